# SPDX-License-Identifier: BSD-3-Clause
"""tools/guest/costs.py, and that docs/costs.md says what was measured."""

import importlib.util
import json

import pytest

pytestmark = pytest.mark.source


@pytest.fixture(scope="module")
def costs(root):
    spec = importlib.util.spec_from_file_location("_costs", root / "tools/guest/costs.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def data(costs):
    return json.loads(costs.DATA.read_text())


def test_page_and_picture_are_of_the_measured_data(costs, data):
    text = costs.PAGE.read_text()
    assert costs.page(text, data) == text, "tools/guest/costs.py --render"
    assert costs.picture(data) == costs.PICTURE.read_text(), "tools/guest/costs.py --render"
    assert costs.written(data) == costs.DATA.read_text()


def flat_and_growing(costs, regions, pages):
    """What the page says in words."""
    first, last = ([region for region in regions if region["pages"] == pages][at] for at in (0, -1))
    for step in ("derive", "pack_first", "pack_again", "invalidate", "derived"):
        assert abs(last[step][1] / first[step][1] - 1) < 0.05, step
    for step in ("mem_reg", "dereg", "registered"):
        assert last[step][1] > 1.5 * first[step][1], step
    assert last["registered"][1] > 3 * last["derived"][1]


@pytest.mark.parametrize("pages", ["4 KiB", "2 MiB"])
def test_measured_data_says_what_the_page_says(costs, data, pages):
    assert [region["length"] for region in data["regions"]][::2] == costs.SIZES
    flat_and_growing(costs, data["regions"], pages)


def steps(costs, **counts):
    return {"pages": costs.SMALL, **{step: [0, 1, 2] for step in costs.STEPS}, **counts}


@pytest.mark.parametrize(
    "found, derived", [("below 4 KiB", 900), ("above 64 KiB", 16001), ("16 KiB", 4000)]
)
def test_break_even_is_where_the_lines_cross(costs, found, derived):
    data = {
        "regions": [
            steps(costs, length=at << 10, derived=[0, derived, 0], registered=[0, at * 250, 0])
            for at in (4, 64)
        ]
    }
    assert costs.break_even(data, costs.SMALL, "derived", "registered") == found


def test_page_without_a_place_for_the_tables_is_refused(costs, data):
    with pytest.raises(ValueError, match="no place"):
        costs.page("# Costs\n", data)


@pytest.mark.guest
@pytest.mark.timeout(400)
def test_measures_in_a_guest(costs, capfd):
    data = costs.measure_in_guest([4 << 10, 2 << 20])
    for pages in (costs.SMALL, costs.HUGE):
        flat_and_growing(costs, data["regions"], pages)
    assert costs.tables(data).count("| 2 MiB |") == 4
