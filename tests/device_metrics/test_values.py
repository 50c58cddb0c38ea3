"""Numbers, addresses and documents as the tools write them."""

from __future__ import annotations

import pytest

from aorta.device_metrics.device_identity import DeviceIdentity, match, physical_index
from aorta.errors import DeviceUnreadable
from aorta.records.device_values import json_in_output, megahertz, number, pci_key


@pytest.mark.parametrize(
    ("written", "value"),
    [
        (87, 87.0),
        (0, 0.0),
        ("87", 87.0),
        ("-3.5 C", -3.5),
        ({"value": 542, "unit": "W"}, 542.0),
        ({"value": "N/A", "unit": "W"}, None),
        ("N/A", None),
        ("", None),
        (None, None),
        ([1, 2], None),
        (True, None),
        (float("nan"), None),
    ],
)
def test_numbers(written, value):
    assert number(written) == value


@pytest.mark.parametrize(("written", "value"), [("(300Mhz)", 300), ("1: (1402Mhz)", 1402), ("2100 MHz", 2100)])
def test_clocks_are_not_levels(written, value):
    assert megahertz(written) == value


def test_addresses_of_one_card_agree_however_they_are_written():
    assert pci_key("0000:83:00.0") == pci_key("00000000:83:00.0") == pci_key("83:00.0") == (0, 0x83, 0, 0)
    assert pci_key("0001:83:00.1") == (1, 0x83, 0, 1)
    assert pci_key("N/A") is pci_key(None) is None


@pytest.mark.parametrize(
    "text",
    [
        '{"a": 1}',
        'WARNING: User is missing the following required groups: render\n{"a": 1}',
        '[WARNING] low power state\n\n  {"a": 1}\nbye',
    ],
)
def test_warnings_before_the_document(text):
    assert json_in_output(text) == {"a": 1}


def test_a_bare_list_and_no_document_at_all():
    assert json_in_output('WARN\n[{"gpu": 0}]') == [{"gpu": 0}]
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
