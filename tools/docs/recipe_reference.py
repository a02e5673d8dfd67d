"""Write docs/reference/recipe.md: every key of a recipe, from the pydantic models that check recipes.

python tools/docs/recipe_reference.py [FILE]        (docs/reference/recipe.md by default)
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from digenrl.config.registry import KINDS, settings_class
from digenrl.config.schema import Recipe

ROOT = Path(__file__).parents[2]

ALIASES = {
    "rollout.num_generations": "group_size, num_image_per_prompt, n, samples_per_prompt (MixGRPO's group_size is something "
    "else: the length of its SDE window)",
    "rollout.prompts_per_step": "train_batch_size (which counts prompts in some trainers and samples in others), groups",
    "rollout.num_inference_steps": "sampling_steps, num_steps",
    "rollout.noise_level": "eta",
    "rollout.true_cfg_scale": "cfg; guidance_scale, as SD3 and Wan users say it",
    "rollout.init_same_noise": "use_same_noise, same_latent",
    "rollout.height": "resolution, h",
    "rollout.width": "resolution, w",
    "model.flow_shift": "shift",
    "algorithm.dynamics": "sde_type",
    "algorithm.timestep_fraction": "the same name in DanceGRPO, which counts int((T - 1) f)",
    "algorithm.clip_range": "clip_ratio",
    "algorithm.kl_beta": "beta, kl_loss_coef",
    "algorithm.advantage_std": "global_std",
    "algorithm.best_of_n": "bestofn",
    "algorithm.updates_per_rollout": "ppo_epochs",
    "train.timestep_batch_size": "batch_replay_steps, micro-batch-size-tstep",
    "schedule.max_stale_fraction": "staleness",
    "cluster.placement": "layout; separate (for disaggregated)",
}
"""What other trainers call a key. A key that no schema has yet is not shown."""

_TYPES = {"integer": "integer", "number": "number", "string": "text", "boolean": "true or false"}
_COMPONENTS = {"algorithm": "algorithm", "model": "model", "reward": "rewards.N"}
"""Kind of component and the section that its keys stand in."""


def render() -> str:
    """The page."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    quickstart = (ROOT / "recipes" / "quickstart.yaml").read_text(encoding="utf-8").strip()
    yield from (
        "# Recipe reference",
        "",
        "*Written by `tools/docs/recipe_reference.py` from `digenrl/config/schema.py` and the settings of the built-in "
        "components; do not edit it by hand.*",
        "",
        "A recipe is one YAML file. This one is complete (`recipes/quickstart.yaml`); what it leaves out has its default:",
        "",
        "```yaml",
        quickstart,
        "```",
        "",
        "```",
        "digenrl check quickstart                     # a file, or a built-in recipe by name; no model is loaded",
        "digenrl train quickstart train.steps=20      # any key can be changed on the command line",
        "```",
        "",
        "Unknown keys and wrong types are errors. Below, a key is written as an override takes it; `N` is a place in a list, "
        "from 0. Paths are relative to the working directory, `builtin:` names a shipped file.",
        "",
    )
    schema = Recipe.model_json_schema()
    sections = "  \n".join(
        f"[`{name}`](#{name}): {_about(_resolve(prop, schema))}" for name, prop in schema["properties"].items()
    )
    yield from (sections, "")
    for name, prop in schema["properties"].items():
        yield from _section(name, prop, schema, required=name in schema["required"])
    for kind, where in _COMPONENTS.items():
        yield from (f"## Built-in {kind}s", "")
        for component, registered in sorted(KINDS[kind].items()):
            yield from (f"### `{component}`: {registered.summary}", "", f"Chosen by `{where}.type={component}`.", "")
            yield from _table(settings_class(kind, component, where=kind).model_json_schema(), where)


def _section(name: str, prop: Mapping[str, Any], schema: Mapping[str, Any], *, required: bool) -> Iterator[str]:
    model = _resolve(prop, schema)
    is_list = "items" in prop
    needed = "Required." if required else "May be left out: there is none then." if "anyOf" in prop else "May be left out."
    yield from (f"## {name}", "", f"{_about(model)} {'A list. ' if is_list else ''}{needed}", "")
    component = {where.partition(".")[0]: kind for kind, where in _COMPONENTS.items()}.get(name)
    if component:
        known = ", ".join(f"[`{each}`](#built-in-{component}s)" for each in sorted(KINDS[component]))
        yield from (f"The keys of the {component} named by `type` stand beside these: {known}.", "")
    yield from _table(model, f"{name}.N" if is_list else name, schema)


def _table(model: Mapping[str, Any], prefix: str, schema: Mapping[str, Any] | None = None) -> Iterator[str]:
    schema = schema or model
    rows = list(_rows(model, prefix, schema))
    yield from ("| key | type | default | bounds | meaning |", "|---|---|---|---|---|")
    yield from ("| " + " | ".join(_cell(cell) for cell in row) + " |" for row in rows)
    yield ""


def _rows(model: Mapping[str, Any], prefix: str, schema: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    for name, prop in model["properties"].items():
        if name == "settings":
            continue
        key = f"{prefix}.{name}"
        nested = _resolve(prop, schema)
        default = "required" if name in model.get("required", ()) else _default(prop, schema)
        about = (prop.get("description") or _default_about(key)).replace("<", "&lt;")
        if "properties" in nested:
            is_list = "items" in prop or any("items" in each for each in prop.get("anyOf", ()))
            yield f"`{key}`", "list of sections" if is_list else "section", default, _bounds(prop), about
            yield from _rows(nested, f"{key}.N" if is_list else key, schema)
        else:
            alias = f" *Also known as: {ALIASES[key]}.*" if key in ALIASES else ""
            yield f"`{key}`", _type(prop), default, _bounds(prop), about + alias


def _default_about(key: str) -> str:
    assert key.endswith(".type"), f"{key} has no description"
    return "Name of a built-in component, or package.module:Class of your own."


def _resolve(prop: Mapping[str, Any], schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """The section that a property is, or is a list of, or may be; the property itself if it is none."""
    alternatives = (prop, *prop.get("anyOf", ()))
    for candidate in (*alternatives, *(each["items"] for each in alternatives if "items" in each)):
        if isinstance(candidate, dict) and "$ref" in candidate:
            found: Mapping[str, Any] = schema["$defs"][candidate["$ref"].rpartition("/")[2]]
            return found
    return prop


def _about(model: Mapping[str, Any]) -> str:
    return " ".join(model["description"].replace("``", "`").split())


def _type(prop: Mapping[str, Any]) -> str:
    if "anyOf" in prop:
        return " or ".join(_type(each) for each in prop["anyOf"])
    if "enum" in prop or "const" in prop:
        return ", ".join(f"`{_yaml(value)}`" for value in prop.get("enum", [prop.get("const")]))
    if prop["type"] == "array":
        inner = prop["prefixItems"][0] if "prefixItems" in prop else prop["items"]
        count = f"{len(prop['prefixItems'])} " if "prefixItems" in prop else ""
        return f"list of {count}{_type(inner)}{'s' if inner['type'] in ('integer', 'number') else ''}"
    if prop["type"] == "object":
        return f"mapping of names to {_type(prop['additionalProperties'])}s"
    return "null" if prop["type"] == "null" else _TYPES[prop["type"]]


def _default(prop: Mapping[str, Any], schema: Mapping[str, Any]) -> str:
    if "default" in prop and not isinstance(prop["default"], (dict, list)):
        return f"`{_yaml(prop['default'])}`" if prop["default"] != "" else "empty"
    if prop.get("type") == "object" or prop.get("default") == []:
        return "none"
    nested = _resolve(prop, schema)
    return "one with its defaults" if "items" in prop and "properties" in nested else "its defaults"


def _bounds(prop: Mapping[str, Any]) -> str:
    """Limits of a value, of whichever alternative has some."""
    found = []
    for each in (prop, *prop.get("anyOf", ())):
        signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
        found += [f"{sign} {_number(each[name])}" for name, sign in signs.items() if name in each]
        found += [f"at least {each['minItems']}"] if "minItems" in each and "prefixItems" not in each else []
        found += ["not empty"] if each.get("minLength") == 1 else []
        found += [f"`{each['pattern']}`"] if "pattern" in each else []
    return ", ".join(found)


def _number(value: float) -> str:
    whole = int(value)
    if whole == value and whole > 2**32 and whole & (whole - 1) == 0:
        return f"2^{whole.bit_length() - 1}"
    return f"{value:g}" if whole != value else str(whole) if whole < 10_000 else f"{whole:,}".replace(",", " ")


def _yaml(value: object) -> str:
    if isinstance(value, float) and 0 < abs(value) < 1e-3:
        mantissa, _, exponent = f"{value:.15g}".partition("e")
        return f"{mantissa}e{int(exponent)}" if exponent else mantissa
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "reference" / "recipe.md"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(render(), encoding="utf-8")
