"""The command line as a user meets it: exit codes, one clear error and no traceback for mistakes of their own."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from typer.testing import CliRunner

from digenrl.cli.main import app, main
from digenrl.cli.train import result_lines
from digenrl.config.registry import KINDS, settings_class
from digenrl.config.schema import Recipe

ROOT = Path(__file__).parents[2]
QUICKSTART = str(ROOT / "recipes" / "quickstart.yaml")
SHAPES = ROOT / "digenrl" / "assets" / "shapes"


@dataclass(frozen=True, slots=True)
class Answer:
    code: int
    out: str
    err: str


Call = Callable[..., Answer]


@pytest.fixture
def digenrl(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """Call the entry point in this process."""

    def call(*arguments: str) -> Answer:
        monkeypatch.setattr(sys, "argv", ["digenrl", *arguments])
        monkeypatch.setattr(sys, "excepthook", sys.excepthook)
        capsys.readouterr()
        with pytest.raises(SystemExit) as caught:
            main()
        out, err = capsys.readouterr()
        return Answer(int(caught.value.code or 0), out, err)

    return call


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory whose modules are forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for module in ("my_failing", "my_shown_rewards"):  # each test writes its own
        monkeypatch.delitem(sys.modules, module, raising=False)
    return tmp_path


def in_a_process(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        timeout=60,
        check=False,
    )


def is_an_error(answer: Answer, *parts: str) -> None:
    assert answer.code == 2
    assert answer.err.startswith("error: ")
    assert "  fix: " in answer.err
    assert "Traceback" not in answer.err + answer.out
    for part in parts:
        assert part in answer.err


def test_check_prints_the_arithmetic_of_a_step(digenrl: Call) -> None:
    answer = digenrl("check", QUICKSTART)
    assert (answer.code, answer.err) == (0, "")
    lines = answer.out.splitlines()
    assert lines[0].startswith("model: sd3 (")
    assert lines[1] == "data: 1366 prompts, 100 steps"
    assert lines[2].startswith("9 prompts x 12 = 108 samples")
    assert lines[3] == "3 of 8 denoising steps trained = 36 pairs a group, 9 forward batches, padding 0 %"
    assert lines[-1] == "ok"


def test_check_in_json_says_the_same_in_numbers(digenrl: Call) -> None:
    answer = digenrl("check", QUICKSTART, "rollout.forward_batch_size=32", "--json")
    assert answer.code == 0
    sums = json.loads(answer.out)
    assert (sums["prompts"], sums["num_generations"], sums["samples"], sums["prompts_in_file"]) == (9, 12, 108, 1366)
    assert (sums["trained_steps"], sums["pairs_per_group"], sums["training_forward_batches"]) == (3, 36, 9)
    assert sums["rollout_padding"] == pytest.approx(1 - 108 / 192)
    assert "forward_batch_size=36" in sums["advice"]
    assert any(
        "category = single" in warning
        for warning in json.loads(digenrl("check", QUICKSTART, "rollout.prompts_per_step=15", "--json").out)["warnings"]
    )


def test_check_advises_on_padding_and_warns_of_prompts(digenrl: Call, workplace: Path) -> None:
    (workplace / "few.txt").write_text("a red circle\n\na 李明 cat\n", encoding="utf-8")
    answer = digenrl(
        "check",
        QUICKSTART,
        "data.prompts=few.txt",
        "data.stratify_by=null",
        "eval.prompts=few.txt",
        "rollout.forward_batch_size=30",
    )
    assert answer.code == 0
    assert "warning: 2 prompts are fewer than the 9 that a step needs" in answer.out
    assert "warning: 1 blank lines of few.txt are skipped" in answer.out
    assert "warning: 2 prompts of eval.prompts are also trained on, for example 'a red circle'" in answer.out
    assert "advice: rollout.forward_batch_size=36 divides" in answer.out


def test_a_misspelt_key_exits_with_2_within_3_seconds_and_names_the_right_one() -> None:
    began = time.monotonic()
    done = in_a_process("-m", "digenrl.cli.main", "check", "recipes/quickstart.yaml", "train.learning_rat=1", cwd=ROOT)
    assert time.monotonic() - began < 3
    assert done.returncode == 2
    assert b"train.learning_rat is not a known key; did you mean learning_rate?" in done.stderr
    assert b"Traceback" not in done.stderr
    assert done.stdout == b""


def test_the_command_line_starts_without_torch_and_so_does_check() -> None:
    heavy = "('torch', 'diffusers', 'transformers', 'ray', 'numpy')"
    code = f"import digenrl.cli.main, sys; assert not [m for m in {heavy} if m in sys.modules]"
    assert in_a_process("-c", code, cwd=ROOT).returncode == 0
    code = (
        "import sys, digenrl.cli.check as c, digenrl.cli.show as s; "
        f"c.run('recipes/quickstart.yaml', [], as_json=False); s.run(None, None); "
        f"assert not [m for m in {heavy} if m in sys.modules]"
    )
    done = in_a_process("-c", code, cwd=ROOT)
    assert done.returncode == 0, done.stderr.decode()


def test_odd_text_on_the_real_command_line_arrives_byte_for_byte(workplace: Path) -> None:
    name = '李明 @ #1, (a) = "b".txt'
    (workplace / name).write_text("a cat\n", encoding="utf-8")
    arguments = ("-m", "digenrl.cli.main", "check", QUICKSTART, f"data.prompts={name}", "data.stratify_by=null", "eval=null")
    done = in_a_process(*arguments, cwd=workplace)
    assert done.returncode == 0, done.stderr.decode()
    assert "data: 1 prompts" in done.stdout.decode()


def test_a_terminal_of_another_encoding_shows_text_escaped_and_fails_nothing(workplace: Path) -> None:
    (workplace / "p.txt").write_text("李明\n", encoding="utf-8")
    arguments = ("check", QUICKSTART, "data.prompts=p.txt", "data.stratify_by=null", "eval.prompts=p.txt")
    done = in_a_process("-m", "digenrl.cli.main", *arguments, cwd=workplace, PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    assert done.returncode == 0, done.stderr.decode()
    assert b"\\u674e\\u660e" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (("nothing.yaml",), ("There is no recipe 'nothing.yaml'",)),
        ((QUICKSTART, "train.steps"), ("Cannot read the override 'train.steps'",)),
        ((QUICKSTART, "model.path=no_such_folder"), ("model.path: there is no folder 'no_such_folder'",)),
        ((QUICKSTART, "model.path=builtin:nothing"), ("is not shipped with DigenRL",)),
        ((QUICKSTART, "model.type=sd33"), ("there is no model called 'sd33'", "Did you mean 'sd3'?")),
        ((QUICKSTART, "rewards.0.type=shape"), ("there is no reward called 'shape'", "Did you mean 'shapes'?")),
        ((QUICKSTART, "data.prompts=nothing.txt"), ("Cannot read 'nothing.txt': No such file or directory",)),
        ((QUICKSTART, "eval.prompts=nothing.jsonl"), ("Cannot read 'nothing.jsonl'",)),
        ((QUICKSTART, "data.stratify_by=colour"), ("has no field 'colour'", "This line has: category, ")),
        ((QUICKSTART, "rollout.num_generations=1"), ("rollout.num_generations (1) is too small",)),
        ((QUICKSTART, "algorithm.sde_window_size=9"), ("algorithm.sde_window_size (9) does not fit",)),
        ((QUICKSTART, "rollout.height=33"), ("rollout.height (33) is not a multiple of 8",)),
        ((QUICKSTART, "train.learning_rate=fast", "train.steps=-1"), ("several problems", "learning_rate", "train.steps")),
    ],
)
@pytest.mark.parametrize("verb", ["check", "train"])
def test_a_mistake_in_the_recipe_is_one_clear_error(
    digenrl: Call, workplace: Path, verb: str, arguments: tuple[str, ...], parts: tuple[str, ...]
) -> None:
    is_an_error(digenrl(verb, *arguments), *parts)
    assert list(workplace.iterdir()) == [], "nothing is written, no run folder either"


def test_a_damaged_prompt_file_is_named_with_its_line_and_leaves_no_run_folder(digenrl: Call, workplace: Path) -> None:
    (workplace / "bad.txt").write_bytes(b"fine\ngro\xdf\n")
    (workplace / "empty.txt").write_bytes(b"\n\n")
    (workplace / "bad.jsonl").write_bytes(b'{"prompt": "a"}\n{"prompt": }\n')
    common = ("data.stratify_by=null", "run.output_dir=out")
    for verb in ("check", "train"):
        is_an_error(digenrl(verb, QUICKSTART, "data.prompts=bad.txt", *common), "bad.txt:2: byte 0xdf is not UTF-8.")
        is_an_error(digenrl(verb, QUICKSTART, "data.prompts=empty.txt", *common), "'empty.txt' holds no prompts")
        is_an_error(digenrl(verb, QUICKSTART, "data.prompts=bad.jsonl", *common), "bad.jsonl:2: this line is not JSON")
    assert not (workplace / "out").exists()


def test_a_damaged_model_folder_is_refused(digenrl: Call, workplace: Path) -> None:
    shutil.copytree(SHAPES / "model", workplace / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    assert digenrl("check", QUICKSTART, "model.path=model").code == 0
    (workplace / "model" / "vae").rename(workplace / "vae")
    is_an_error(digenrl("check", QUICKSTART, "model.path=model"), "'model' has no component 'vae'")
    (workplace / "vae").rename(workplace / "model" / "vae")
    index = workplace / "model" / "model_index.json"
    index.write_text(index.read_text(encoding="utf-8").replace("StableDiffusion3Pipeline", "FluxPipeline"), encoding="utf-8")
    is_an_error(
        digenrl("check", QUICKSTART, "model.path=model"), "'model' holds a FluxPipeline, and model.type needs a StableDiffusion3"
    )
    index.unlink()
    is_an_error(digenrl("check", QUICKSTART, "model.path=model"), "has no model_index.json")


REWARD = """\
from pydantic import BaseModel, Field

class Bright:
    class Settings(BaseModel):
        level: float = Field(default=0.5, description="How bright is bright.")
        tags: list[str] = Field(default_factory=list)
        must: int

    def __init__(self, settings):
        self.settings = settings

    def score(self, samples):
        return {sample.id: float(sample.image.mean()) for sample in samples}
"""


def test_a_user_s_reward_is_found_in_the_working_directory(workplace: Path) -> None:
    (workplace / "my_rewards.py").write_text(REWARD, encoding="utf-8")
    recipe = Path(QUICKSTART).read_text(encoding="utf-8")
    start = recipe.index("  - {type: shapes")
    end = recipe.index("\n", start)
    (workplace / "mine.yaml").write_text(
        recipe[:start] + "  - {type: my_rewards:Bright, must: 3}" + recipe[end:], encoding="utf-8"
    )
    script = shutil.which("digenrl", path=Path(sys.executable).parent)
    command = [script] if script else [sys.executable, "-m", "digenrl.cli.main"]
    for extra, code, part in (((), 0, "ok"), (("rewards.0.levle=1",), 2, "did you mean level?")):
        done = subprocess.run(
            [*command, "check", "mine.yaml", *extra], cwd=workplace, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == code, done.stderr
        assert part in done.stdout + done.stderr
        assert "Traceback" not in done.stderr


def test_show_lists_every_component(digenrl: Call) -> None:
    answer = digenrl("show")
    assert answer.code == 0
    for kind, known in KINDS.items():
        assert f"{kind}:\n" in answer.out
        for name, registered in known.items():
            assert name in answer.out
            assert registered.summary in answer.out


@pytest.mark.parametrize("kind", list(KINDS))
def test_show_lists_one_kind(digenrl: Call, kind: str) -> None:
    answer = digenrl("show", kind)
    assert answer.code == 0
    assert [line.split()[0] for line in answer.out.splitlines()] == sorted(KINDS[kind])


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, known in KINDS.items() for name in known])
def test_show_documents_every_setting_of_a_component(digenrl: Call, kind: str, name: str) -> None:
    answer = digenrl("show", kind, name)
    assert answer.code == 0
    lines = answer.out.splitlines()
    for key, info in settings_class(kind, name, where="test").model_fields.items():
        line = next(line for line in lines if line.startswith((f"{key} ", f"{key}: ")))
        assert str(info.description) in line
        is_section = line.startswith(f"{key}: ") and any(each.startswith(f"{key}.") for each in lines)
        assert is_section or "(default " in line or "(required)" in line


def test_show_recipe_documents_every_key(digenrl: Call) -> None:
    out = digenrl("show", "recipe").out
    for section, info in Recipe.model_fields.items():
        assert f"\n{section}." in f"\n{out}"
        for key in getattr(info.annotation, "model_fields", {}):
            assert f"\n{section}.{key}" in f"\n{out}" or key == "settings"
    for line in (
        "train.steps (required): RL steps of the run.",
        "model.lora.rank (default 32): ",
        "train.ema.decay (default 0.9): ",
        "train.deterministic (default false): ",
        "train.timestep_batch_size (default all): ",
        "rewards.weight (default 1.0): ",
        "rewards.type (required): name of the reward; ",
        "algorithm.type (required): name of the algorithm; ",
        "eval.prompts (required): ",
        "run.output_dir (default null): ",
    ):
        assert f"\n{line}" in f"\n{out}", line
    assert "settings" not in [line.partition(" ")[0].rpartition(".")[2] for line in out.splitlines()]


def test_show_recipe_can_be_asked_for_one_section(digenrl: Call) -> None:
    out = digenrl("show", "recipe", "schedule").out
    assert {line.partition(".")[0] for line in out.splitlines()} == {"schedule"}


def test_show_documents_a_user_s_component(digenrl: Call, workplace: Path) -> None:
    (workplace / "my_shown_rewards.py").write_text(REWARD, encoding="utf-8")
    out = digenrl("show", "reward", "my_shown_rewards:Bright").out
    assert out.splitlines() == [
        "level (default 0.5): How bright is bright.",
        "tags (default []): (no description)",
        "must (required): (no description)",
    ]


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("prizes",), "There is nothing called 'prizes' to show"),
        (("reward", "jpge"), "Did you mean 'jpeg'?"),
        (("recipe", "trian"), "A recipe has no section 'trian'"),
        (("reward", "no_such_module_here:X"), "cannot import"),
    ],
)
def test_show_of_what_is_not_there_is_an_error(digenrl: Call, arguments: tuple[str, ...], part: str) -> None:
    is_an_error(digenrl("show", *arguments), part)


def snapshot(folder: Path) -> dict[str, str]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_an_output_folder_that_holds_another_run_is_refused_and_left_as_it_was(digenrl: Call, workplace: Path) -> None:
    folder = workplace / "old"
    (folder / "final").mkdir(parents=True)
    (folder / "metrics.jsonl").write_text('{"kind": "train"}\n', encoding="utf-8")
    (folder / "final" / "parameters.safetensors").write_bytes(b"precious")
    before = snapshot(folder)
    is_an_error(digenrl("train", QUICKSTART, "run.output_dir=old"), "run.output_dir: 'old' is not an empty folder")
    told = digenrl("train", QUICKSTART, "run.output_dir=old", "schedule.max_stale_fraction=0.25").out
    assert "warning: schedule.max_stale_fraction (0.25)" in told, "what comes to nothing is said by train, too"
    assert snapshot(folder) == before
    (workplace / "file").write_bytes(b"x")
    is_an_error(digenrl("train", QUICKSTART, "run.output_dir=file"), "run.output_dir: 'file' is not an empty folder")
    assert (workplace / "file").read_bytes() == b"x"


def test_the_digest_of_a_folder_without_weights_is_an_error(digenrl: Call, workplace: Path) -> None:
    is_an_error(digenrl("digest", "nothing"), "holds no complete checkpoint", "the folder of a run that has one")
    (workplace / "run" / "final").mkdir(parents=True)
    (workplace / "run" / "final" / "parameters.safetensors").write_bytes(b"junk")
    is_an_error(digenrl("digest", "run"), "holds no complete checkpoint")


@pytest.mark.parametrize("arguments", [("fly",), ("check",), ("check", QUICKSTART, "--fast"), ("digest",)])
def test_a_command_line_that_is_none_exits_with_2(digenrl: Call, arguments: tuple[str, ...]) -> None:
    answer = digenrl(*arguments)
    assert answer.code == 2
    assert "Traceback" not in answer.err
    assert "Usage" in answer.err


def test_help_exits_with_0_and_names_the_verbs(digenrl: Call) -> None:
    answer = digenrl("--help")
    assert answer.code == 0
    for verb in ("train", "check", "show", "digest"):
        assert verb in answer.out


FAILING = """\
from digenrl.errors import ConfigError, RunFailed
from pydantic import BaseModel

class Failing:
    class Settings(BaseModel):
        how: str

        def check(self, recipe):
            if self.how == "yours":
                raise ConfigError("The recipe is odd.", fix="Mend it.")
            if self.how == "failed":
                raise RunFailed("Three steps were voided.", fix="Look at metrics.jsonl.")
            try:
                {}["colour"]
            except KeyError as cause:
                if self.how == "caused":
                    raise RunFailed("The reward mine raised KeyError.") from cause
                raise
"""


@pytest.mark.parametrize(
    ("how", "code", "traceback", "last_line"),
    [
        ("yours", 2, False, "  fix: Mend it."),
        ("failed", 3, False, "  fix: Look at metrics.jsonl."),
        ("caused", 3, True, "error: The reward mine raised KeyError."),
        ("bug", 3, True, "KeyError: 'colour'"),
    ],
)
def test_errors_have_their_exit_codes_and_only_a_failure_in_code_shows_a_traceback(
    digenrl: Call, workplace: Path, how: str, code: int, traceback: bool, last_line: str
) -> None:
    (workplace / "my_failing.py").write_text(FAILING, encoding="utf-8")
    answer = digenrl("check", QUICKSTART, f"algorithm={{type: my_failing:Failing, how: {how}}}")
    assert answer.code == code
    assert ("Traceback" in answer.err) == traceback
    assert answer.err.startswith("Traceback" if traceback else "error: ")
    assert answer.err.rstrip().splitlines()[-1] == last_line


def test_the_result_of_a_run_is_told_in_words_also_where_a_part_was_never_valid() -> None:
    evaluation = {"reward_before": 0.5, "reward_after": 0.625, "num_images": 400, "strict_before": 0.25, "strict_after": None}
    assert list(result_lines({"eval": evaluation, "steps": 3, "seconds": 1.5})) == [
        "held-out reward: 0.500 -> 0.625 (+0.125), 400 images",
        "3 steps; 1.5 s in all, loading, evaluation and saving included",
    ]
    nothing = result_lines({"eval": None, "steps": 0, "seconds": 1.5})
    assert list(nothing) == ["0 steps; 1.5 s in all, loading, evaluation and saving included"]


def test_the_app_itself_can_be_called_by_typer_s_runner() -> None:
    result = CliRunner().invoke(app, ["check", QUICKSTART])
    assert result.exit_code == 0
    assert result.output.endswith("ok\n")


def test_check_says_how_samples_fall_onto_ranks_and_what_unevenness_costs(digenrl: Call) -> None:
    answer = digenrl("check", QUICKSTART, "cluster.placement=disaggregated", "cluster.generators=[{replicas: 2, ranks: 5}]")
    assert answer.code == 0
    assert "2 replicas of 5 ranks: 36 samples of a full micro-batch, 7 to 8 a rank, ranks idle 10 %" in answer.out


def test_an_address_is_refused_for_a_run_in_one_process(digenrl: Call, tmp_path: Path) -> None:
    alone = ("cluster.placement=inline", f"run.output_dir={tmp_path / 'run'}")
    answer = digenrl("train", QUICKSTART, *alone, "--address", "127.0.0.1:6379")
    assert answer.code == 2
    assert "cluster.placement=disaggregated" in answer.err


@pytest.mark.parametrize("override", ["schedule.tag=greedy", "schedule.max_stale_fraction=0.25"])
def test_tag_and_staleness_need_a_trainer_of_their_own(digenrl: Call, override: str) -> None:
    answer = digenrl("check", QUICKSTART, "cluster.placement=inline", override)
    assert answer.code == 2
    assert "cluster.placement" in answer.err


def test_an_image_larger_than_the_model_can_draw_is_refused_before_it_is_loaded(digenrl: Call) -> None:
    answer = digenrl("check", QUICKSTART, "rollout.height=4096")
    assert answer.code == 2
    assert "rollout.height (4096) is more than the 128 pixels" in answer.err


def test_pools_of_their_own_default_to_bts_plus_and_one_process_to_never() -> None:
    from digenrl.config.loader import load_recipe

    assert load_recipe(QUICKSTART, ["cluster.placement=inline"]).tag == "never"
    assert load_recipe(QUICKSTART, ["cluster.placement=disaggregated"]).tag == "bts_plus"


def test_padding_advice_looks_at_the_samples_of_each_rank(digenrl: Call) -> None:
    pools = "cluster.generators=[{replicas: 1, ranks: 4}]"
    answer = digenrl("check", QUICKSTART, "cluster.placement=disaggregated", pools, "rollout.forward_batch_size=12")
    assert "rollout.forward_batch_size=9 divides the samples of every rank" in answer.out


def test_check_warns_where_bfloat16_would_make_the_importance_ratio_noise(digenrl: Call) -> None:
    advice = "give rollout.forward_batch_size and train.timestep_batch_size one value"
    assert advice not in digenrl("check", QUICKSTART, "model.dtype=bfloat16").out
    assert advice in digenrl("check", QUICKSTART, "model.dtype=bfloat16", "rollout.forward_batch_size=12").out
