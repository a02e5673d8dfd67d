"""The denoising loop: canonical batches, what is stored, and what each sample's result may depend on."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from digenrl.diffusion.batching import row_batches
from digenrl.diffusion.dynamics import ODE, FlowSDE, gaussian_log_prob
from digenrl.diffusion.noise import sde_noise
from digenrl.diffusion.noise_schedule import NoiseSchedule
from digenrl.diffusion.sampler import Denoised, StepPlan, denoise
from digenrl.ids import SampleId

SIGMAS = torch.tensor([1.0, 0.9, 0.7, 0.4, 0.1, 0.0])
SCHEDULE = NoiseSchedule(sigmas=SIGMAS, timesteps=SIGMAS[:-1] * 1000)
SHAPE = (2, 3, 3)


def velocity(latents: Tensor, timesteps: Tensor, rows: Tensor) -> Tensor:
    """A field that depends on everything it may depend on: place, time and which sample it is."""
    scale = 1 + rows.float().view(-1, 1, 1, 1) / 10
    return torch.tanh(latents * scale) + timesteps.view(-1, 1, 1, 1) / 1000


def initial(count: int) -> Tensor:
    return torch.stack([torch.randn(SHAPE, generator=torch.Generator().manual_seed(i)) for i in range(count)])


def noise(step: int, rows: Tensor) -> Tensor:
    return sde_noise([SampleId(0, 0, row) for row in rows.tolist()], SHAPE, step, seed=5)


def plan(count: int, trained: list[int], *, noisy: list[int] | None = None) -> StepPlan:
    levels = torch.zeros(count, 5)
    levels[:, trained if noisy is None else noisy] = 0.7
    return StepPlan(noise_levels=levels, trained=torch.tensor(trained).expand(count, -1))


def run(count: int = 5, size: int = 2, trained: tuple[int, ...] = (0, 1, 3), **changes: object) -> Denoised:
    arguments = {
        "predict": velocity,
        "initial": initial(count),
        "plan": plan(count, list(trained)),
        "dynamics": FlowSDE(),
    } | changes
    return denoise(**arguments, schedule=SCHEDULE, sde_noise=noise, forward_batch_size=size)  # type: ignore[arg-type]


@pytest.mark.parametrize(("rows", "size"), [(1, 4), (4, 4), (5, 4), (7, 3), (3, 1)])
def test_rows_are_cut_into_batches_of_one_size_and_each_real_row_comes_once(rows: int, size: int) -> None:
    batches = list(row_batches(rows, size))
    assert all(len(batch.rows) == size for batch in batches)
    assert [row for batch in batches for row in batch.rows[: batch.count].tolist()] == list(range(rows))
    assert all(bool((batch.rows < rows).all()) for batch in batches)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_every_forward_pass_has_exactly_the_canonical_number_of_rows(size: int) -> None:
    seen: list[tuple[int, ...]] = []

    def predict(latents: Tensor, timesteps: Tensor, rows: Tensor) -> Tensor:
        seen.append((len(latents), len(timesteps), len(rows)))
        return velocity(latents, timesteps, rows)

    result = run(size=size, predict=predict)
    assert set(seen) == {(size, size, size)}
    assert len(seen) == 5 * -(-5 // size)
    assert result.final_latents.shape == (5, *SHAPE)


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_padding_is_cropped_and_the_cut_changes_nothing(size: int) -> None:
    whole, cut = run(size=5), run(size=size)
    for name in ("latents", "next_latents", "log_probs", "final_latents"):
        assert torch.equal(getattr(whole, name), getattr(cut, name))


def test_the_loop_is_the_one_that_a_plain_loop_over_single_samples_gives() -> None:
    result = run(count=4, trained=(0, 2, 3))
    for row in range(4):
        x = initial(4)[row : row + 1]
        for step in range(5):
            v = velocity(x, SCHEDULE.timesteps[step : step + 1], torch.tensor([row]))
            level = torch.tensor([0.7 if step in (0, 2, 3) else 0.0])
            out = FlowSDE().step(x, v, SIGMAS[step : step + 1], SIGMAS[step + 1 : step + 2], SIGMAS[1], level)
            x_next = out.mean
            if step in (0, 2, 3):
                slot = (0, 2, 3).index(step)
                x_next = out.mean + out.transition_std.view(-1, 1, 1, 1) * noise(step, torch.tensor([row]))
                assert torch.equal(result.latents[row, slot], x[0])
                torch.testing.assert_close(result.next_latents[row, slot], x_next[0])
                torch.testing.assert_close(
                    result.log_probs[row, slot], gaussian_log_prob(x_next, out.mean, out.transition_std)[0], rtol=1e-5, atol=1e-5
                )
            x = x_next
        torch.testing.assert_close(result.final_latents[row], x[0])


def test_samples_of_one_batch_may_be_noisy_at_different_steps() -> None:
    levels = torch.zeros(3, 5)
    trained = torch.tensor([[0, 1], [1, 3], [2, 3]])
    levels.scatter_(1, trained, 0.7)
    mixed = run(count=3, plan=StepPlan(noise_levels=levels, trained=trained))
    for row in range(3):
        alone = run(count=3, plan=plan(3, trained[row].tolist()))
        assert torch.equal(mixed.final_latents[row], alone.final_latents[row])
        assert torch.equal(mixed.log_probs[row], alone.log_probs[row])


def test_noise_is_drawn_only_for_rows_that_are_noisy_at_a_step() -> None:
    asked: list[tuple[int, list[int]]] = []

    def recorded(step: int, rows: Tensor) -> Tensor:
        asked.append((step, rows.tolist()))
        return noise(step, rows)

    levels = torch.zeros(3, 5)
    levels[0, 1] = levels[2, 1] = levels[1, 3] = 0.7
    trained = torch.tensor([[1], [3], [1]])
    denoise(
        velocity,
        initial(3),
        SCHEDULE,
        StepPlan(noise_levels=levels, trained=trained),
        FlowSDE(),
        recorded,
        forward_batch_size=2,
    )
    assert asked == [(1, [0, 2]), (3, [1])]


def test_noisy_steps_that_are_not_trained_still_add_their_noise() -> None:
    quiet = run(count=2, plan=plan(2, [0]))
    noisy = run(count=2, plan=plan(2, [0], noisy=[0, 1, 2]))
    assert torch.equal(quiet.next_latents, noisy.next_latents)
    assert not torch.equal(quiet.final_latents, noisy.final_latents)


def test_a_plan_without_noise_is_the_ode() -> None:
    nothing = StepPlan(noise_levels=torch.zeros(5, 5), trained=torch.empty(5, 0, dtype=torch.int64))
    sde, ode = run(plan=nothing), run(plan=nothing, dynamics=ODE())
    assert torch.equal(sde.final_latents, ode.final_latents)
    assert sde.latents.shape == (5, 0, *SHAPE)


def test_no_step_of_the_loop_keeps_a_graph() -> None:
    weight = torch.nn.Parameter(torch.ones(()))
    result = run(predict=lambda x, t, rows: velocity(x, t, rows) * weight)
    assert not result.final_latents.requires_grad
    assert not result.log_probs.requires_grad


@pytest.mark.parametrize("level", [0.0, -0.5, float("nan")])
def test_a_plan_that_trains_a_step_without_noise_is_refused(level: float) -> None:
    levels = torch.full((2, 5), 0.7)
    levels[1, 2] = level
    with pytest.raises(AssertionError, match="without noise"):
        StepPlan(noise_levels=levels, trained=torch.tensor([[0, 1], [0, 2]]))
