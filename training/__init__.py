"""Makes the demo model: exercises, tokenizer, training and evaluation.

`training.tasks` needs only the standard library, so that tests can use it without torch.
"""
