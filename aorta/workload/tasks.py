"""Selects the workload that a configuration names.

Must not know the details of any workload.
"""

from __future__ import annotations

from aorta.config.schema import Config, Gpt, Ranking, Resnet18
from aorta.errors import ConfigError
from aorta.workload.gpt_task import GptTask
from aorta.workload.ranking_task import RankingTask
from aorta.workload.resnet18_task import Resnet18Task
from aorta.workload.task import Task


def task_of(config: Config) -> Task:
    """The workload that `config` trains.

    Raises:
        ConfigError: its workload is not one that is trained.
    """
    match config.workload:
        case Ranking() as shape:
            return RankingTask(config, shape)
        case Resnet18() as shape:
            return Resnet18Task(config, shape)
        case Gpt() as shape:
            return GptTask(config, shape)
        case other:
            raise ConfigError(f"workload={other.name!r}: nothing that can be trained")
