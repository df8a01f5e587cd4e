"""From prompts to completions, and scoring them."""

from common.sampling.generate import Sampled, sample, why_no_cache
from common.sampling.rewards import Reward, Scorer, load_rewards, score, scorer
from common.sampling.sampler import Sampler, make_sampler
from common.sampling.schedule import RolloutSchedule

__all__ = [
    "Reward",
    "RolloutSchedule",
    "Sampled",
    "Sampler",
    "Scorer",
    "load_rewards",
    "make_sampler",
    "sample",
    "score",
    "scorer",
    "why_no_cache",
]
