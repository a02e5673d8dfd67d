"""GenEval's rules on detections made by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from digenrl.config.settings.geneval import GenEvalSettings, Scene
from digenrl.rewards.geneval.rules import Found, Group, Verdict, by_class, judge, overlap, relations
from digenrl.rewards.remote.wire import decode_request, encode_request
from tests.rewards.services import pictures

SETTINGS = GenEvalSettings()
BOX = (0.0, 0.0, 10.0, 10.0)


def at(label: str, x: float, y: float, *, size: float = 10, score: float = 0.95) -> Found:
    """An object around a point."""
    return Found(label=label, score=score, box=(x - size / 2, y - size / 2, x + size / 2, y + size / 2))


def several(label: str, count: int) -> list[Found]:
    return [at(label, 20 * number, 0) for number in range(count)]


def verdict(found: Sequence[Found], *include: dict[str, Any], colors: Sequence[str] = (), **more: Any) -> Verdict:
    """colors: of the objects, in their order."""
    scene = Scene.from_metadata({"tag": more.pop("tag", "any"), "include": list(include), **more})
    by_object = dict(zip(map(id, found), colors, strict=False))

    def colors_of(label: str, objects: Group) -> list[str]:
        assert all(each.label == label for each in objects)
        return [by_object[id(each)] for each in objects]

    return judge(scene, by_class(found, scene.tag, SETTINGS), colors_of, SETTINGS)


def one(label: str, **more: Any) -> dict[str, Any]:
    return {"class": label, "count": 1, **more}


def test_a_single_object_is_there_or_not() -> None:
    assert verdict([at("dog", 0, 0)], one("dog")) == Verdict(strict=True, soft=1)
    assert verdict([at("cat", 0, 0)], one("dog")) == Verdict(strict=False, soft=0)
    assert verdict([], one("dog")) == Verdict(strict=False, soft=0)


def test_of_two_objects_both_must_be_there() -> None:
    assert verdict([at("dog", 0, 0), at("cup", 9, 9)], one("dog"), one("cup")).strict
    assert verdict([at("dog", 0, 0)], one("dog"), one("cup")) == Verdict(strict=False, soft=0.5)


@pytest.mark.parametrize(
    ("count", "strict", "soft"), [(2, False, (2 / 3 + 1) / 2), (3, True, 1), (4, False, 0.5), (0, False, 0.5)]
)
def test_counting_wants_so_many_and_not_one_more(count: int, strict: bool, soft: float) -> None:
    exclude = [{"class": "cup", "count": 4}]
    found = verdict(several("cup", count), {"class": "cup", "count": 3}, exclude=exclude, tag="counting")
    assert found.strict is strict
    assert found.soft == pytest.approx(soft)


def test_prompts_that_count_want_a_surer_detector() -> None:
    unsure = [at("cup", 0, 0, score=0.8), at("cup", 30, 0, score=0.95)]
    two = {"class": "cup", "count": 2}
    assert verdict(unsure, two).strict
    assert not verdict(unsure, two, tag="counting").strict
    assert not verdict([at("cup", 0, 0, score=0.3)], one("cup")).strict  # surer than, not as sure as


def test_a_color_is_asked_of_the_surest_objects_alone() -> None:
    dogs = [at("dog", 0, 0, score=0.6), at("dog", 30, 0, score=0.9)]
    assert verdict(dogs, one("dog", color="red"), colors=["blue", "red"]).strict
    assert verdict(dogs, one("dog", color="red"), colors=["red", "blue"]) == Verdict(strict=False, soft=0.5)
    both = {"class": "dog", "count": 2, "color": "red"}
    assert verdict(dogs, both, colors=["red", "red"]).strict
    assert verdict(dogs, both, colors=["red", "blue"]) == Verdict(strict=False, soft=0.75)


def test_color_attribution_wants_each_object_in_its_own_color() -> None:
    found = [at("dog", 0, 0), at("cup", 30, 0)]
    wanted = [one("dog", color="red"), one("cup", color="blue")]
    assert verdict(found, *wanted, colors=["red", "blue"]).strict
    assert verdict(found, *wanted, colors=["blue", "red"]) == Verdict(strict=False, soft=0.5)


@pytest.mark.parametrize(("x", "y", "where"), [(-50, 0, "left of"), (50, 0, "right of"), (0, -50, "above"), (0, 50, "below")])
def test_an_object_stands_where_its_centre_lies_seen_from_the_other(x: float, y: float, where: str) -> None:
    found = [at("cup", 100, 100), at("dog", 100 + x, 100 + y)]
    for relation in ("left of", "right of", "above", "below"):
        right = verdict(found, one("cup"), one("dog", position=[relation, 0]))
        assert right == Verdict(strict=relation == where, soft=1 if relation == where else 2 / 3)


def test_a_diagonal_has_two_directions_and_near_objects_have_none() -> None:
    cup = at("cup", 0, 0)
    assert relations(at("dog", 100, -100), cup, 0.1) == {"right of", "above"}
    # Sizes of 10 and 10 take 2 off each axis: an offset of 2 is none, and of 3 a third is left, which is not a half.
    assert relations(at("dog", 2, 0), cup, 0.1) == set()
    assert relations(at("dog", 3, 0), cup, 0.1) == set()
    assert relations(at("dog", 5, 0), cup, 0.1) == {"right of"}
    assert relations(at("dog", 3, 0), cup, 0) == {"right of"}
    assert relations(at("dog", 100, 30), cup, 0.1) == {"right of"}


def test_a_place_is_right_only_beside_an_object_that_is_right_itself() -> None:
    found = [at("cup", 100, 100), at("dog", 0, 100)]
    wanted = [one("cup", color="red"), one("dog", position=["left of", 0])]
    assert verdict(found, *wanted, colors=["red"]).strict
    assert verdict(found, *wanted, colors=["blue"]) == Verdict(strict=False, soft=0.5)
    assert verdict(found[1:], one("cup"), wanted[1]) == Verdict(strict=False, soft=1 / 3)


def test_every_object_must_stand_right_to_every_other() -> None:
    wanted = [{"class": "cup", "count": 2}, {"class": "dog", "count": 2, "position": ["left of", 0]}]
    cups = [at("cup", 100, 0), at("cup", 140, 0)]
    assert verdict([*cups, at("dog", 0, 0), at("dog", 20, 0)], *wanted).strict
    # One dog stands between the cups: right of one, left of the other.
    assert verdict([*cups, at("dog", 0, 0), at("dog", 120, 0)], *wanted) == Verdict(strict=False, soft=(1 + 1 + 0.75) / 3)


def test_the_surest_objects_of_a_class_count_up_to_a_number() -> None:
    found = [at("cup", number, 0, score=0.4 + number / 100) for number in range(20)]
    kept = by_class(found, "any", SETTINGS)["cup"]
    assert [each.score for each in kept] == sorted((each.score for each in found), reverse=True)[:16]


def test_an_object_that_overlaps_a_surer_one_can_be_left_out() -> None:
    found = [at("cup", 0, 0, score=0.5), at("cup", 1, 0, score=0.9), at("dog", 0, 0, score=0.4), at("cup", 50, 0, score=0.4)]
    assert len(by_class(found, "any", SETTINGS)["cup"]) == 3
    groups = by_class(found, "any", GenEvalSettings(max_overlap=0.5))
    assert [each.score for each in groups["cup"]] == [0.9, 0.4] and len(groups["dog"]) == 1


def test_overlap_is_that_of_boxes_with_their_last_pixels() -> None:
    assert overlap(BOX, BOX) == 1
    assert overlap(BOX, (20, 20, 30, 30)) == 0
    assert overlap(BOX, (5, 0, 15, 10)) == pytest.approx(6 * 11 / (2 * 121 - 66))


def test_metadata_that_ask_for_nothing_or_for_the_impossible_are_told_before_a_run() -> None:
    def wrong(**metadata: Any) -> str:
        return GenEvalSettings().check_prompt("a photo of a dog", metadata) or ""

    assert wrong(tag="single_object", include=[one("dog")]) == ""
    assert wrong(tag="position", include=[one("cup"), one("dog", position=("above", 0))]) == ""
    assert "no `tag`" in wrong(include=[one("dog")])
    assert "nothing to look for" in wrong(tag="a")
    assert "not a list" in wrong(tag="a", include="dog")
    assert "count of at least 1" in wrong(tag="a", include=[{"class": "dog", "count": 0}])
    assert "count of at least 1" in wrong(tag="a", include=[{"class": "dog", "count": True}])
    assert "'grey' is none of red" in wrong(tag="a", include=[one("dog", color="grey")])
    assert "no earlier entry" in wrong(tag="a", include=[one("dog", position=["above", 0])])
    assert "not a pair" in wrong(tag="a", include=[one("cup"), one("dog", position=["near", 0])])
    assert "does not end" in wrong(tag="a", include=[one("cup"), one("dog", position=["above", "0"])])


def test_metadata_reach_a_service_as_they_were_sent() -> None:
    metadata = {"tag": "position", "include": [one("cup", color="red"), one("dog", position=("above", 0))]}
    sample = replace(pictures(1)[0], metadata=metadata)
    _, (arrived,) = decode_request(encode_request("r", [sample]))
    assert Scene.from_metadata(arrived.metadata) == Scene.from_metadata(metadata)
