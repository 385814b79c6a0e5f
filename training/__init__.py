"""Makes the demo model: exercises, tokenizer, training and measurement.

`training.tasks` needs the standard library only, so that tests can ask questions and
judge answers where torch is not installed.
"""
