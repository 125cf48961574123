"""The proportions of a plan that no published run has: said in sentences, never refused."""

from collections.abc import Iterator

from train.model.shape import num_parameters
from train.plan.plan import Plan

LEAST_RATIO, GPT_3 = 1.7, "GPT-3 175B: 300 G tokens; Brown et al. 2020, arXiv 2005.14165, table 2.1"
MOST_RATIO, QWEN_3 = 60_000.0, "Qwen 3 0.6B: 36 T tokens; Yang et al. 2025, arXiv 2505.09388, sections 2 and 3"
FEW_STEPS = 100
"""Steps below which a warm-up of a tenth is ten updates or fewer."""
MOST_EMBEDDINGS = 0.5
"""Share of the parameters in the embeddings that is called large."""


def odd_proportions(plan: Plan) -> Iterator[str]:
    """What is out of proportion, a sentence each."""
    ratio = plan.num_tokens / plan.num_params
    if ratio < LEAST_RATIO:
        yield (
            f"{ratio:.3g} tokens for each of {plan.num_params:,} parameters: fewer than in any published run "
            f"({LEAST_RATIO} in {GPT_3}); most of the model will stay as it was drawn. Train a smaller one, or longer."
        )
    if ratio > MOST_RATIO:
        yield (
            f"{ratio:,.0f} tokens for each of {plan.num_params:,} parameters: more than in any published run "
            f"({MOST_RATIO:,.0f} in {QWEN_3}); a larger model would learn more of them."
        )
    if plan.steps < FEW_STEPS:
        yield (
            f"{plan.steps} steps are few: {plan.warmup_steps} of them warm up. A smaller train.global_batch makes more "
            f"of the same tokens."
        )
    share = 1 - num_parameters(plan.shape, False) / plan.num_params
    if share > MOST_EMBEDDINGS:
        yield (
            f"{100 * share:.0f} % of the parameters are embeddings of {plan.shape.vocab_size:,} tokens; a smaller "
            "vocabulary would leave more to the layers."
        )
