"""A card that is not there: tensors that are on `cuda:0` for torch and compute their real values on the CPU.

What no machine without a card ever runs, runs: CUDA's autocast, GradScaler, fused optimizers, loading straight to a
card, and the error that a tensor of the host beside one of the card raises. Waiting of the host for the card is counted
by source line, and which attention kernel would have been chosen is noted.

It says nothing about kernels, timing, memory or several cards. `python -m simulated_card` runs commands on it.
"""
