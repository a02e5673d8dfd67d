"""What the loader says about recipes that are not right: each mistake once, with its place and the nearest known key."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic import ValidationError

from digenrl.config.loader import load_recipe, recipe_from_plain
from digenrl.config.schema import Recipe
from digenrl.errors import ConfigError

Write = Callable[[str | bytes], Path]
ROOT = Path(__file__).parents[2]


def refused(path: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_recipe(path, overrides)
    return caught.value.what


def line_of(text: str, part: str) -> int:
    return text[: text.index(part)].count("\n") + 1


def test_the_smallest_recipe_loads_with_documented_defaults(write: Write, text: str) -> None:
    recipe = load_recipe(write(text))
    assert recipe.rollout.num_generations == 6
    assert recipe.train.learning_rate == pytest.approx(3e-4, rel=1e-12), "YAML 1.1 reads 3e-4 as a text"
    assert recipe.run.seed == 0
    assert recipe.eval is None
    assert recipe.model.lora is None
    assert recipe.rewards[0].name == "shapes"


def test_a_recipe_is_frozen(write: Write, text: str) -> None:
    recipe = load_recipe(write(text))
    with pytest.raises(ValidationError):
        recipe.train.steps = 4


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("rollout:", "rolout:", "rolout is not a known key; did you mean rollout?"),
        ("  learning_rate: 3e-4", "  learning_rat: 3e-4", "train.learning_rat is not a known key; did you mean learning_rate?"),
        ("  type: sd3", "  type: sd3\n  max_seqence_length: 0", "model.max_seqence_length is not a known key; did you mean max_"),
        ("  type: sd3", "  type: sd3\n  grad_checkpointing: true", "did you mean gradient_checkpointing?"),
        ("  type: sd3", "  type: sd3\n  lora: {rnk: 4}", "model.lora.rnk is not a known key; did you mean rank?"),
        (
            "  type: flow_grpo",
            "  type: flow_grpo\n  clip_rnge: 1",
            "algorithm.clip_rnge is not a known key; did you mean clip_range?",
        ),
        (
            "  type: flow_grpo",
            "  type: dance_grpo\n  sde_window_size: 2",
            "algorithm.sde_window_size is a key of another type of algorithm",
        ),
        ("weight: 2.0", "wieght: 2.0", "rewards.0.wieght is not a known key; did you mean weight?"),
        ("weight: 2.0", "strict_wait: 2.0", "rewards.0.strict_wait is not a known key; did you mean strict_weight?"),
        ("  steps: 3", "  steps: 3\n  ema: {dekay: 0.9}", "train.ema.dekay is not a known key; did you mean decay?"),
        ("  steps: 3", "  steps: 3\n  num_generations: 4", "did you mean rollout.num_generations?"),
        ("  steps: 3", "  steps: 3\n  num_inference_step: 4", "did you mean rollout.num_inference_steps?"),
        ("  steps: 3", "  steps: 3\n  kl_beta: 4", "did you mean algorithm.kl_beta?"),
        ("  steps: 3", "  steps: 3\n  flow_shift: 4", "did you mean model.flow_shift?"),
        ("  learning_rate: 3e-4", "  learning_rate: 3e-4\nsettings: 4", "settings is not a known key; known are: "),
        ("  learning_rate: 3e-4", "  learning_rate: 3e-4\n'al[go]': 4", "al[go] is not a known key"),
        ("  learning_rate: 3e-4", "  learning_rate: 3e-4\nint: 4", "int is not a known key"),
        ("  steps: 3", "  steps: 3\n  settings: {}", "train.settings is not a known key"),
        ("  learning_rate: 3e-4", "  learning_rate: 3e-4\nseed: 4", "seed is not a known key; did you mean run.seed?"),
        (
            "  height: 32",
            "  height: 32\n  zzz: 1",
            "rollout.zzz is not a known key; known are: forward_batch_size, fps, guidance_scale, ",
        ),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_one_and_its_line(
    write: Write, text: str, old: str, new: str, says: str
) -> None:
    changed = text.replace(old, new)
    path = write(changed)
    what = refused(path)
    assert says in what
    assert f"({path}:{line_of(changed, new) + new.count(chr(10))})" in what


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        (
            "prompts_per_step: 4",
            "prompts_per_step: four",
            "rollout.prompts_per_step cannot be 'four': input should be a valid int",
        ),
        ("prompts_per_step: 4", "prompts_per_step: 4.5", "rollout.prompts_per_step cannot be 4.5"),
        ("prompts_per_step: 4", "prompts_per_step: [4]", "rollout.prompts_per_step cannot be [4]"),
        ("prompts_per_step: 4", "prompts_per_step:", "rollout.prompts_per_step cannot be None"),
        ("prompts_per_step: 4", "prompts_per_step: 0", "rollout.prompts_per_step cannot be 0: input should be greater"),
        ("prompts_per_step: 4", "prompts_per_step: yes", "rollout.prompts_per_step cannot be true: a number is asked for"),
        (
            "prompts_per_step: 4",
            "prompts_per_step: 90000000",
            "rollout.prompts_per_step cannot be 90000000: input should be less",
        ),
        ("learning_rate: 3e-4", "learning_rate: true", "train.learning_rate cannot be true: a number is asked for"),
        ("learning_rate: 3e-4", "learning_rate: .inf", "train.learning_rate cannot be inf: input should be a finite number"),
        ("learning_rate: 3e-4", "learning_rate: .nan", "train.learning_rate cannot be nan"),
        ("weight: 2.0", "weight: .nan", "rewards.0.weight cannot be nan"),
        ("weight: 2.0", "strict_weight: on", "rewards.0.strict_weight cannot be true: a number is asked for"),
        ("weight: 2.0", "strict_weight: 0, soft_weight: 0", "rewards.0 cannot stand as it is: strict_weight and soft_weight are"),
        ("  type: flow_grpo", "  type: flow_grpo\n  sde_window_range: [1, true]", "algorithm.sde_window_range.1 cannot be true"),
        ("  type: flow_grpo", "  type: flow_grpo\n  adv_clip_max: .inf", "algorithm.adv_clip_max cannot be inf"),
        ("steps: 3", "timestep_batch_size: many\n  steps: 3", "train.timestep_batch_size cannot be 'many'"),
        ("steps: 3", "timestep_batch_size: 0\n  steps: 3", "train.timestep_batch_size cannot be 0"),
        ("steps: 3", "deterministic: maybe\n  steps: 3", "train.deterministic cannot be 'maybe'"),
        ("model:\n", "run: {name: a b}\nmodel:\n", "run.name cannot be 'a b'"),
        ("model:\n", "run: {device: gpu}\nmodel:\n", "run.device cannot be 'gpu'"),
        ("model:\n", "run: {seed: -1}\nmodel:\n", "run.seed cannot be -1"),
        ("model:\n", "run: 3\nmodel:\n", "run cannot be 3"),
        ("model:\n", "1: 2\nmodel:\n", "1 cannot be 1: keys should be strings"),
        ("  steps: 3\n", "", "train.steps is required and missing"),
    ],
)
def test_a_wrong_value_is_refused_with_its_key_value_and_file(write: Write, text: str, old: str, new: str, says: str) -> None:
    path = write(text.replace(old, new))
    what = refused(path)
    assert says in what
    assert f"({path}" in what
    assert "several" not in what


def test_a_choice_says_what_can_be_chosen(write: Write, text: str) -> None:
    what = refused(write(text), "train.timestep_batch_size=some")
    assert "greater than or equal to 1" in what or "valid integer" in what
    assert "'all'" in what


def test_a_huge_value_is_shortened_in_the_message(write: Write, text: str) -> None:
    what = refused(write(text), "run.device=" + "x" * 5000)
    assert len(what) < 6000 and "xxx...xxx" in what


def test_several_problems_are_told_at_once_each_with_its_line(write: Write, text: str) -> None:
    changed = text.replace("learning_rate", "learning_rat").replace("height: 32", "height: tall").replace("weight", "wieght")
    path = write(changed)
    what = refused(path, "train.stesp=4")
    assert what.count("\n  - ") == 4
    for part in ("train.learning_rat ", "rollout.height ", "rewards.0.wieght "):
        line = next(line for line in what.splitlines() if part in line)
        assert f"({path}:{line_of(changed, part.split('.')[-1].strip() + ':')})" in line
    assert "train.stesp is not a known key; did you mean steps? (command line, train.stesp=4)" in what


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("algorithm:\n  type: flow_grpo", "algorithm: flow_grpo", "algorithm must be a mapping with a `type`"),
        ("algorithm:\n  type: flow_grpo", "algorithm: {clip_range: 1}", "algorithm.type is required: it names the component"),
        ("algorithm:\n  type: flow_grpo", "algorithm:", "algorithm must be a mapping with a `type`"),
        ("algorithm:\n  type: flow_grpo\n", "", "algorithm is required and missing"),
        ("  - {type: shapes, weight: 2.0}", "  - shapes", "rewards.0 must be a mapping with a `type`"),
        ("  - {type: shapes, weight: 2.0}", "  - {weight: 2.0}", "rewards.0.type is required: it names the component"),
        ("  - {type: shapes, weight: 2.0}", "  []", "rewards cannot stand as it is: a run needs at least one reward"),
        ("  - {type: shapes, weight: 2.0}", "  type: shapes", "rewards cannot be {'type': 'shapes'}"),
        ("weight: 2.0", "settings: {strict_weight: 1}", "rewards.0.settings is not a key of its own: settings stand directly"),
        ("  type: flow_grpo", "  type: flow_grpo\n  settings: {}", "algorithm.settings is not a key of its own"),
    ],
)
def test_a_component_that_is_not_written_as_one_is_told_in_one_sentence(
    write: Write, text: str, old: str, new: str, says: str
) -> None:
    what = refused(write(text.replace(old, new)))
    assert what.startswith(says), what


def test_two_rewards_of_one_name_need_names_of_their_own(write: Write, text: str) -> None:
    two = text.replace("weight: 2.0}", "weight: 2.0}\n  - {type: shapes, strict_weight: 1}")
    assert "two rewards have the same name; give them different `name`s" in refused(write(two))
    recipe = load_recipe(write(two), ["rewards.1.name=strict"])
    assert [reward.name for reward in recipe.rewards] == ["shapes", "strict"]


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ("train:\n  steps: 3\ntrain:\n  steps: 4\n", ":3: the key train stands here a second time"),
        ("train:\n  steps: 3\n  steps: 4\n", ":3: the key train.steps stands here a second time"),
        ("rewards:\n- type: shapes\n  type: jpeg\n", ":3: the key rewards.0.type stands here a second time"),
        ("a: {b: 1, b: 2}\n", ":1: the key a.b stands here a second time"),
    ],
)
def test_a_key_that_stands_twice_is_refused_with_both_lines(write: Write, bad: str, says: str) -> None:
    path = write(bad)
    with pytest.raises(ConfigError) as caught:
        load_recipe(path)
    assert caught.value.what.startswith(f"{path}{says}")
    assert "It was first given in line" in caught.value.why


@pytest.mark.parametrize(
    ("bad", "line"),
    [
        ("train:\n  steps: [3\n", 3),
        ("train:\n steps: 3\n  x: 4\n", 3),
        ("train: a: b\n", 1),
        ("a: 1\n\tb: 2\n", 2),
        ("a: 1\nb: \0\n", 2),
        ("a: 1\nb: *nothing\n", 2),
        ("a: 1\nb: !!python/object/apply:os.getcwd []\n", 2),
        ("a: 1\n---\nb: 2\n", 2),
        ("a: 1\n? [1]\n: 2\n", 2),
        ("a: 1\nb: !!int ''\n", 2),
        ("a: 1\nb: !!bool x\n", 2),
        ("a: 1\nb: " + "1" * 5000 + "\n", 2),
        ("a: 1\nb: &x\n  - *x\n", 2),
    ],
)
def test_what_is_not_yaml_is_refused_with_its_line(write: Write, bad: str, line: int) -> None:
    path = write(bad)
    assert refused(path).startswith(f"{path}:{line}: ")


def test_sections_nested_without_end_are_refused(write: Write) -> None:
    assert "nested too deeply" in refused(write("[" * 600))


@pytest.mark.parametrize("empty", ["", "\n\n", "# nothing yet\n", "---\n"])
def test_an_empty_recipe_is_called_empty(write: Write, empty: str) -> None:
    assert "this is empty" in refused(write(empty))


@pytest.mark.parametrize("other", ["- a\n- b\n", "just text\n", "3\n"])
def test_a_recipe_that_is_no_mapping_is_refused(write: Write, other: str) -> None:
    assert "a recipe is a mapping of sections" in refused(write(other))


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_a_bad_byte_is_named_with_its_line(write: Write, text: str, mark: bytes) -> None:
    path = write(mark + text.encode().replace(b"height: 32", b"height: 32 # gro\xdf"))
    assert refused(path) == f"{path}:{line_of(text, 'height')}: byte 0xdf is not UTF-8."


def test_a_byte_order_mark_and_windows_line_ends_change_nothing(write: Write, text: str) -> None:
    plain = load_recipe(write(text))
    assert load_recipe(write(b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode())) == plain


@pytest.mark.parametrize("name", ["nothing.yaml", ".", "a\0b", "x" * 5000])
def test_a_recipe_that_is_not_there_is_refused_whatever_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="There is no recipe"):
        load_recipe(name)


def test_sections_that_are_left_empty_have_their_defaults(write: Write, text: str) -> None:
    assert load_recipe(write(text + "run:\nschedule:\nlog:\n")) == load_recipe(write(text))


def test_a_date_is_a_text_and_may_name_a_run(write: Write, text: str) -> None:
    assert load_recipe(write(text + "run: {name: 2026-01-31}\n")).run.name == "2026-01-31"
    assert load_recipe(write(text + "run: {name: 2026-99-99}\n")).run.name == "2026-99-99"


def test_yaml_anchors_work_and_an_override_changes_only_what_it_names(write: Write, text: str) -> None:
    shared = text + "eval: {prompts: builtin:shapes/heldout.jsonl, num_inference_steps: &steps 5}\nlog: {num_samples: *steps}\n"
    recipe = load_recipe(write(shared), ["eval.num_inference_steps=7"])
    assert recipe.eval is not None
    assert (recipe.eval.num_inference_steps, recipe.log.num_samples) == (7, 5)
    two = text.replace("  - {type: shapes, weight: 2.0}", "  - &r {type: shapes, name: a}\n  - *r")
    recipe = load_recipe(write(two), ["rewards.1.name=b"])
    assert [reward.name for reward in recipe.rewards] == ["a", "b"]


def test_aliases_that_stand_for_millions_of_values_are_read_in_no_time(write: Write, text: str) -> None:
    levels = "".join(f"  - &l{i} [{', '.join([f'*l{i - 1}'] * 10)}]\n" for i in range(1, 9))
    path = write(f"x:\n  - &l0 lol\n{levels}" + text + "log: *l8\n")
    assert "log cannot be [[[[" in refused(path)


def test_the_plain_form_of_a_recipe_loads_to_an_equal_recipe(write: Write, text: str) -> None:
    overrides = [
        "model.lora={rank: 4, target_modules: [to_q, to_k]}",
        "train.ema.decay=0.5",
        "eval={prompts: held_out.txt, freq: 3}",
        "algorithm.sde_window_range=[1, 4]",
        "rewards=[{type: shapes, soft_weight: 0}, {type: jpeg, weight: -0.5, name: size}]",
    ]
    recipe = load_recipe(write(text), overrides)
    plain = recipe.to_plain()
    assert recipe_from_plain(plain) == recipe
    assert plain["rewards"][1].items() >= {"type": "jpeg", "weight": -0.5, "name": "size", "quality": 75}.items()
    assert "settings" not in repr(plain)


def test_determinism_implies_updates_by_index(write: Write, text: str) -> None:
    assert load_recipe(write(text)).update_order == "arrival"
    assert load_recipe(write(text), ["train.deterministic=true"]).update_order == "index"
    assert load_recipe(write(text), ["schedule.update_order=index"]).update_order == "index"


def test_every_key_of_a_recipe_and_of_the_built_in_settings_is_documented() -> None:
    from digenrl.config.registry import KINDS, settings_class

    models = [section for section in map(_section, Recipe.model_fields.values()) if section is not None]
    models += [settings_class(kind, name, where="test") for kind, known in KINDS.items() for name in known]
    for model in models:
        for name, info in model.model_fields.items():
            assert info.description or name in {"type", "settings"}, f"{model.__name__}.{name} has no description"


def _section(info: object) -> type | None:
    from digenrl.config.loader import _model_in

    return _model_in(info.annotation)
