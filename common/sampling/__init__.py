"""From prompts to completions, and scoring them."""

from common.sampling.generate import Sampled, sample
from common.sampling.rewards import Reward, Scorer, load_rewards, score, scorer
from common.sampling.rollout import RolloutSchedule
from common.sampling.whole import why_no_cache

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
