"""From prompts to completions, and scoring them."""

from common.sampling.generate import Sampled, sample
from common.sampling.rewards import Reward, load_rewards, score, score_by_name
from common.sampling.rollout import RolloutSchedule
from common.sampling.sampler import ModelSampler, Sampler, load_sampler, sample_shared, score_shared
