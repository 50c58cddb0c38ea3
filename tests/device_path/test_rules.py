"""What the device path must hold, with the simulated device as the witness: the loop of `scenario` in every way, and
small scenes of what needs one of its own.

All ways are held to the same; the reference is what runs unobserved. All of it runs in virtual time.
"""

from __future__ import annotations

import gc
import subprocess
import sys
from typing import Any

import pytest
import torch

from aorta.distributed.topology import Topology
from aorta.instrument.native import build as native
from tests.device_path import block_scenes as blocks
from tests.device_path import collective_forms as forms
from tests.device_path import collective_scenes as collectives
from tests.device_path import stream_scenes as streams
from tests.device_path.rig import MODES, Groups, Scene, groups, stream_id, unbound_group
from tests.device_path.scenario import run, use
from tests.runs import ROOT
from tests.simulated import device as simulated
from tests.simulated.load import native as simulator
from tests.simulated.programs import needs_device, on_devices

pytestmark = [pytest.mark.simulated, pytest.mark.dist, needs_device, pytest.mark.thorough]
OBSERVED = ("dedicated", "observe")
FOR_EVERY_WAY = (forms.every_form, collectives.failing, collectives.handles)
FOR_ONE = (streams.unread_epochs, streams.uncertain_clock, streams.waits_told, streams.spins, collectives.not_compiled)
WAYS_OF = dict.fromkeys(FOR_EVERY_WAY, tuple(MODES)) | dict.fromkeys(FOR_ONE, ("dedicated",))
"""Others are looked at in each mode that observes."""
PLAYED = {
    f"{scene.__name__}-{way}": (scene, way)
    for module in (blocks, forms, collectives, streams)
    for scene in vars(module).values()
    if getattr(scene, "__annotations__", {}) == {"scene": "Scene", "return": "Told"}
    and scene.__module__ == module.__name__
    for way in WAYS_OF.get(scene, OBSERVED)
}
CAPTURES = [name for name, (scene, _) in PLAYED.items() if scene in (blocks.capture, blocks.capture_over_steps)]


def played(_topology: Topology, device: torch.device, name: str) -> Any:
    """What a scene found and what it must find; or of every loop what it found wrong, and what it used."""
    own = groups(device)
    simulated.defaults()
    gc.collect()
    if name != "loop":
        scene, way = PLAYED[name]
        return scene(Scene(device, own, way))
    wrong, shape = run(Scene(device, own, "off"))
    # When threads free what they held is not the same twice.
    without = [use(Scene(device, own, "off")) for _ in range(3)]
    told = {"off": {"wrong": wrong, "use": {what: max(used[what] for used in without) for what in without[0]}}}
    told |= {way: {"wrong": run(Scene(device, own, way), shape)[0]} for way in MODES}
    for way in MODES:
        told[way]["use"] = use(Scene(device, own, way))
    return told


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """What each rank says of the loop and of every scene."""
    return on_devices(played, tmp_path_factory.mktemp("rules"), {name: [name] for name in ("loop", *PLAYED)})


@pytest.mark.parametrize("way", ["off", *MODES])
def test_the_record_is_the_devices_own_and_nothing_else_changes(told: dict[str, list[Any]], way: str) -> None:
    """Starts, ends, lengths and stalls; values, races, waits of the host, and when everything runs on the device. No
    more memory is needed in peak, or held on to, and no event is made in steady state beyond those that torch and the
    loop make themselves. `off`: the loop itself is right.
    """
    for rank in told["loop"]:
        assert rank[way]["wrong"] == []
        for what, used in rank[way]["use"].items():
            assert used <= max(other["off"]["use"][what] for other in told["loop"]), what


@pytest.mark.parametrize("name", PLAYED)
def test_a_scene_finds_what_it_must(told: dict[str, list[Any]], name: str) -> None:
    """The scenes' docstrings say what that is."""
    for found, expected in told[name]:
        assert found == expected


def ask_the_runtime() -> None:
    """The compiled interceptor of this process asks whether a stream is captured, as it does with torch 2.11."""
    native.FLAGS = (*native.FLAGS, "-DAORTA_CAPTURE_BY_RUNTIME")  # type: ignore[misc]  # another library by its name


def played_by_runtime(topology: Topology, device: torch.device, name: str) -> Any:
    """A scene, with what times collectives, and how often the runtime was asked until then."""
    if "-DAORTA_CAPTURE_BY_RUNTIME" not in native.FLAGS:
        ask_the_runtime()
    told = played(topology, device, name)
    by = native.compiled(device, wanted=True, emulated=False)[1]
    return [*told, by, *simulator().counts("capture_questions").values()]


def test_captures_are_noticed_by_asking_the_runtime(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Torch 2.11's streams do not say whether they are captured; the simulated device answers the runtime's question
    (`cudaStreamIsCapturing`), and captures are as with newer ones. The library is kept, as the ordinary one is.
    """
    build = "from tests.device_path import test_rules; test_rules.ask_the_runtime(); test_rules.native.build()"
    subprocess.run([sys.executable, "-c", build], cwd=ROOT, check=True)
    cases = {name: [name] for name in CAPTURES}
    for ranks in on_devices(played_by_runtime, tmp_path_factory.mktemp("by_runtime"), cases).values():
        for found, expected, by, asked in ranks:
            assert found == expected
            assert by == "native"
            assert asked > 10


def two_peers(_topology: Topology, device: torch.device, way: str) -> dict[str, Any]:
    """One of three ranks sends to both others at once: kinds, starts and ends in the record and on the device. The
    second rank, to which the first one sends first, receives last.
    """
    unbound = unbound_group()
    transfer(torch.zeros(1, device=device), unbound)  # communicators' own streams, before an instrument takes any
    scene = Scene(device, Groups(*[unbound] * 6, {priority: stream_id(priority) for priority in (0, -1)}), way)
    x = scene.tensor()
    with scene.one_step():
        if scene.rank:
            torch.cuda._sleep((500_000, 100_000)[scene.rank - 1])
        transfer(x, unbound)
    return {"rows": [row[:3] for row in scene.rows()], "kernels": scene.kernels()}


def transfer(x: torch.Tensor, group: torch.distributed.ProcessGroup) -> None:
    """A group that is bound to no device has a communicator for each pair of ranks: their transfers overlap."""
    if torch.distributed.get_rank():
        works = [torch.distributed.irecv(x, 0, group=group)]
    else:
        works = [torch.distributed.isend(x, peer, group=group) for peer in (1, 2)]
    for work in works:
        work.wait()
    torch.accelerator.synchronize()


def test_transfers_with_two_peers_are_timed_apart(tmp_path_factory: pytest.TempPathFactory) -> None:
    cases = {way: [way] for way in OBSERVED}
    for ranks in on_devices(two_peers, tmp_path_factory.mktemp("peers"), cases, ranks=3).values():
        for number, rank in enumerate(ranks):
            assert rank["rows"] == rank["kernels"]
            assert len(rank["rows"]) == (1 if number else 2)
