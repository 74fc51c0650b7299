"""What is exchanged with other tools: outputs, tasks, rewards, models, sealed results, command lines.

In: what lm-eval, OpenCompass, EvalScope, inspect_ai or a script wrote. Out: predictions with the ids of our questions;
task files of the same tools; and results that others recompute. Start reading in `predictions.py`, then `tasks.py`;
`reward_files.py` writes our rewards for frameworks of reinforcement learning, `exporting/` models for other libraries,
`sealing/` results without the questions' texts, `compat/` runs the CMExam repository's command lines, `exam_text.py` is
a metric for `evaluate`.
"""
