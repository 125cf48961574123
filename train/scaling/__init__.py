"""Scaling laws and published rules, without torch: what a budget buys, what repeats are worth, what a run costs."""
