"""A public benchmark of rules that decide when, where and what a network grows."""
