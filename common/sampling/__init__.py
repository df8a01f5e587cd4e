"""From prompts to completions, and scoring them."""

from common.sampling.generate import Sampled, sample, why_no_cache
from common.sampling.rewards import Reward, Scorer, load_rewards, score, scorer
from common.sampling.rollout import RolloutSchedule

__all__ = [
    "Reward",
    "RolloutSchedule",
    "Sampled",
    "Scorer",
    "load_rewards",
    "sample",
    "score",
    "scorer",
    "why_no_cache",
]
