"""rocm-smi: its JSON and its text give the same numbers; real outputs where the samples are there (D5, D27). Numbers,
addresses and documents as tools write them.
"""

from __future__ import annotations

import json

import pytest

from aorta.device_metrics.rocm_smi import Program, RocmSmi, words_of
from aorta.device_metrics.sources import DeviceIdentity, match, pci_key, physical_index
from aorta.errors import DeviceUnreadable
from aorta.records.device_values import (
    Values,
    from_json,
    json_in_output,
    megahertz,
    normalised,
    number,
    read_words,
)
from tests.runs import ROOT

SAMPLES = ROOT.parent / "shared" / "samples" / "smi"
MI300 = {
    "card0": {
        "Temperature (Sensor junction) (C)": "41.0",
        "Temperature (Sensor memory) (C)": "33.0",
        "mclk clock speed:": "(900Mhz)",
        "mclk clock level:": "0",
        "sclk clock speed:": "(132Mhz)",
        "sclk clock level:": "1",
        "Current Socket Graphics Package Power (W)": "139.0",
        "GPU use (%)": "0",
        "GPU Memory Allocated (VRAM%)": "0",
        "VRAM Total Used Memory (B)": "297324544",
        "PCI Bus": "0000:0C:00.0",
    },
    "card1": {"Temperature (Sensor junction) (C)": "N/A", "GPU use (%)": "100", "PCI Bus": "0000:22:00.0"},
    "system": {"Driver version": "6.7.0"},
}
TEXT = """
============================ ROCm System Management Interface ============================
GPU[0]\t\t: Temperature (Sensor junction) (C): 41.0
GPU[0]\t\t: Temperature (Sensor memory) (C): 33.0
GPU[0]\t\t: Current Socket Graphics Package Power (W): 139.0
GPU[0]\t\t: mclk clock level: 0: (900Mhz)
GPU[0]\t\t: sclk clock level: 1: (132Mhz)
GPU[0]\t\t: GPU use (%): 0
GPU[0]\t\t: VRAM Total Used Memory (B): 297324544
GPU[0]\t\t: PCI Bus: 0000:0C:00.0
GPU[1]\t\t: GPU use (%): 100
GPU[1]\t\t: PCI Bus: 0000:22:00.0
================================== End of ROCm SMI Log ===================================
"""
CARD_0 = Values(41.0, 139.0, 132.0, 900.0, 0.0, 297324544)
CARD_1 = Values(util_pct=100.0)


@pytest.mark.skipif(not SAMPLES.exists(), reason="the samples are not beside this checkout")
@pytest.mark.parametrize(
    ("file", "values"),
    [
        ("rocm_smi_mi100_rocm602_card0.json", Values(55.0, 36.0, 300.0, 1200.0, 0.0, 6750208)),
        ("rocm_smi_rx6700xt_rocm612.json", Values(47.0, 6.0, 0.0, 96.0, 0.0, 1572745216)),
    ],
)
@pytest.mark.spec("D27")
def test_real_outputs(file, values):
    (card,) = from_json(json.loads((SAMPLES / file).read_text()))
    assert normalised(card) == values


@pytest.mark.spec("D27")
def test_each_rank_reads_its_own_card(program):
    program(
        "rocm-smi",
        f"echo 'WARNING: AMD GPU device(s) is/are in a low-power state'\ncat <<'END'\n{json.dumps(MI300)}\nEND",
    )
    assert RocmSmi(DeviceIdentity("rocm", pci="0000:0c:00.0")).read() == CARD_0
    assert RocmSmi(DeviceIdentity("rocm", pci="0000:22:00.0")).read() == CARD_1
    with pytest.raises(DeviceUnreadable, match="cannot tell which of 2 cards"):
        RocmSmi(DeviceIdentity("rocm", pci="0000:38:00.0")).read()


@pytest.mark.spec("D5")
def test_values_and_words_come_from_one_run(program, tmp_path):
    program("rocm-smi", f"echo \"$*\" >>{tmp_path}/calls\ncat <<'END'\n{TEXT}\nEND\necho careful >&2")
    source = RocmSmi(DeviceIdentity("rocm", index=0), keep_words=True)
    assert source.read() == CARD_0
    raw = source.raw()
    assert raw["rocm_smi_output"].strip() == TEXT.strip()
    assert (raw["rocm_smi_exit_code"], raw["rocm_smi_stderr"]) == (0, "careful\n")
    assert raw["rocm_smi_t_ns"] > 10**18
    assert source.raw() == {}
    (call,) = (tmp_path / "calls").read_text().splitlines()
    assert call.startswith("--showtemp --showuse --showpower --showmemuse ")
    assert "--json" not in call


@pytest.mark.spec("D5")
def test_without_the_program_and_where_it_fails(program):
    with pytest.raises(DeviceUnreadable, match=r"^rocm-smi not available$"):
        RocmSmi(DeviceIdentity("rocm"))
    program("rocm-smi", "echo half; echo 'ERROR: no driver' >&2; exit 3")
    _, raw = words_of(Program("rocm-smi"))
    assert raw["rocm_smi_output"] == "half\n"
    assert (raw["rocm_smi_exit_code"], raw["rocm_smi_stderr"]) == (3, "ERROR: no driver\n")
    with pytest.raises(DeviceUnreadable, match="rocm-smi ended with 3: ERROR: no driver"):
        RocmSmi(DeviceIdentity("rocm")).read()


def test_the_power_cap_and_the_performance_level(program):
    card = {"card0": {"Max Graphics Package Power (W)": "290.0", "Performance Level": "manual"}}
    program("rocm-smi", f"cat <<'END'\n{json.dumps(card)}\nEND")
    assert RocmSmi(DeviceIdentity("rocm")).settings() == {"power_cap_w": 290.0, "performance_level": "manual"}


@pytest.mark.spec("D27")
def test_words_that_nobody_matched_to_a_device():
    one = TEXT[: TEXT.index("GPU[1]")]
    assert read_words(one, 5, 8) == (CARD_0, None)  # the only card there is
    assert [read_words(TEXT, rank, 2) for rank in range(2)] == [(CARD_0, None), (CARD_1, None)]
    for ranks in (1, 4, None):
        assert read_words(TEXT, 0, ranks) == (Values(), "rocm-smi: cannot tell which of 2 cards this rank computed on")
    assert read_words("", 0, 1, exit_code=3, stderr="no driver\n") == (Values(), "rocm-smi ended with 3: no driver")
    assert read_words("", 0, 1, error="rocm-smi not available") == (Values(), "rocm-smi not available")


@pytest.mark.parametrize(
    ("read", "written", "value"),
    [
        (number, 87, 87.0),
        (number, 0, 0.0),
        (number, "-3.5 C", -3.5),
        (number, {"value": 542, "unit": "W"}, 542.0),
        (number, {"value": "N/A", "unit": "W"}, None),
        (number, "N/A", None),
        (number, "", None),
        (number, None, None),
        (number, [1, 2], None),
        (number, True, None),
        (number, float("nan"), None),
        (megahertz, "(300Mhz)", 300),  # and no levels
        (megahertz, "1: (1402Mhz)", 1402),
        (megahertz, "2100 MHz", 2100),
        (pci_key, "0000:83:00.0", (0, 0x83, 0, 0)),
        (pci_key, "00000000:83:00.0", (0, 0x83, 0, 0)),
        (pci_key, "83:00.0", (0, 0x83, 0, 0)),
        (pci_key, "0001:83:00.1", (1, 0x83, 0, 1)),
        (pci_key, "N/A", None),
        (pci_key, None, None),
        (json_in_output, 'WARNING: User is missing the following required groups: render\n{"a": 1}', {"a": 1}),
        (json_in_output, '[WARNING] low power state\n\n  {"a": 1}\nbye', {"a": 1}),
        (json_in_output, 'WARN\n[{"gpu": 0}]', [{"gpu": 0}]),
    ],
)
def test_numbers_addresses_and_documents(read, written, value):
    assert read(written) == value


def test_no_document_at_all():
    with pytest.raises(DeviceUnreadable, match="no JSON in its output: 'Permission denied'"):
        json_in_output("Permission denied")


CARDS = [("0000:0c:00.0", "a"), ("0000:22:00.0", "b"), ("0000:22:00.1", "c")]


@pytest.mark.parametrize(
    ("identity", "found", "card"),
    [
        (DeviceIdentity("rocm", pci="0000:0c:00.0", index=2), CARDS, "a"),
        (DeviceIdentity("rocm", pci="0000:22:00.1"), CARDS, "c"),
        (
            DeviceIdentity("rocm", pci="0000:38:00.0", index=0),
            CARDS,
            None,
        ),  # another card's numbers are worse than none
        (DeviceIdentity("rocm", pci="0000:0c:00.0"), [("0000:0c:00.2", "a"), ("0000:22:00.0", "b")], "a"),
        (DeviceIdentity("rocm", index=1), CARDS, "b"),
        (DeviceIdentity("rocm", index=7), CARDS, None),
        (DeviceIdentity("rocm"), CARDS, None),
        (DeviceIdentity("rocm"), [(None, "only")], "only"),
        (DeviceIdentity("rocm", pci="0000:0c:00.0", index=1), [(None, "a"), (None, "b")], "b"),
    ],
)
def test_a_card_is_found_by_its_address_or_not_guessed(identity, found, card):
    assert match(identity, found) == card


@pytest.mark.parametrize(
    ("platform", "ordinal", "environment", "index"),
    [
        ("cuda", 1, {}, 1),
        ("cuda", 1, {"CUDA_VISIBLE_DEVICES": "4,6"}, 6),
        ("cuda", 0, {"CUDA_VISIBLE_DEVICES": "GPU-5ebe9f43"}, None),
        ("cuda", 2, {"CUDA_VISIBLE_DEVICES": "4,6"}, None),
        ("rocm", 0, {"HIP_VISIBLE_DEVICES": "3", "CUDA_VISIBLE_DEVICES": "5"}, 3),
        ("rocm", 0, {"ROCR_VISIBLE_DEVICES": "2,3", "HIP_VISIBLE_DEVICES": "1"}, None),
    ],
)
def test_devices_that_are_hidden_shift_the_count(platform, ordinal, environment, index):
    assert physical_index(platform, ordinal, environment) == index
