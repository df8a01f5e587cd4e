"""experiments/train_dynamic_sampling.py: which groups are drawn again; what is trained is as in train_grpo.py, in float64."""

import pytest

from tests.scripts.grpo_by_hand import Settings, chat_rows, check, run_grpo

G = 4
CASES = {
    "full": {"steps_per_generation": 2, "num_iterations": 2},
    "std of the rollout": {"scale_rewards": "batch"},
    "not full": {"loss_type": "grpo", "beta": 0.1},
}
KINDS = {"not full": ("flat", "any", "flat", "flat")}


@pytest.mark.parametrize("name", CASES)
def test_groups_of_equal_rewards_are_drawn_again(name, launch, tmp_path, model):
    """Until rewards differ in every group, or to the last draw; each draw is of the groups that are missing, and the first
    is that of train_grpo.py."""
    flags, settings = Settings.flags(**CASES[name])
    kinds, draws = KINDS.get(name, ("any", "flat", "any", "flat")), 2 if name == "not full" else 10
    flat = [row["prompt"] for row in chat_rows(kinds) if row["kind"] == "flat"]
    size, drawn, given = settings.size * settings.steps_per_generation, [], []

    def rollouts_of(calls):
        given.extend(calls)
        rollouts, numbers = [], []
        for call in calls:
            if not rollouts or numbers[-1] == draws or sum(useful(group) for group in rollouts[-1]) == size // G:
                rollouts, numbers = [*rollouts, []], [*numbers, 0]
            assert len(call) == size - G * sum(useful(group) for group in rollouts[-1])
            rollouts[-1] += [call[first : first + G] for first in range(0, len(call), G)]
            numbers[-1] += 1
        drawn.extend(numbers)
        return [sum(sorted(groups, key=lambda group: not useful(group)), []) for groups in rollouts]

    def useful(group):  # by `rating` of the rewards
        return group[0][0] not in flat and len({sum(ids) * 37 % 11 for _, _, ids in group}) > 1

    words = [*flags, "--max_draws", draws, "--max_steps", 2 * settings.cycle]
    run = run_grpo(launch, tmp_path, "dynamic_sampling", model, *words, rows=chat_rows(kinds), rollouts_of=rollouts_of)
    assert len(drawn) == 2 and max(drawn) > 1
    everything = run.rollouts
    run.rollouts = [rollout[:size] for rollout in everything]
    left_out = [rollout[size:] for rollout in everything]
    assert any(left_out) and not any(completion.advantage for rollout in left_out for completion in rollout)
    idle = [not any(c.advantage for c in rollout[at : at + G]) for rollout in run.rollouts for at in range(0, size, G)]
    assert any(idle) == (name == "not full")
    check(run, settings)
    for n, start in enumerate(run.starts):
        row, share = run.rows[start], len(left_out[n]) / len(everything[n])
        assert row.get("completions/left_out_ratio", 0) == pytest.approx(share)
        assert row["reward"] == pytest.approx(sum(c.reward for c in everything[n]) / len(everything[n]))
    flags += ["--max_steps", settings.cycle]
    parent = run_grpo(launch, tmp_path, "grpo", model, *flags, rows=chat_rows(kinds), output="parent")
    assert [c.ids for c in parent.rollouts[0]] == [ids for _, _, ids in given[0]]
