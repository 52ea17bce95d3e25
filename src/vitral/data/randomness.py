"""Random numbers keyed by (seed, epoch, sample), so that they do not depend on the order in which samples are loaded.

Two numbers of samples that no dataset reaches are the keys of whole epochs and of whole batches. Needs no torch.
"""

import numpy as np

Generator = np.random.Generator
ORDER_SAMPLE = 2**40 - 1
"""The sample whose random numbers are the order of an epoch."""
BATCH_SAMPLE = 2**40 - 2
"""The sample whose random numbers a whole batch shares, for mixing and masking. Their epoch is the step."""


def random_generator(seed: int, epoch: int, sample: int) -> Generator:
    """Return a generator that depends on its key only, independent for each sample of each epoch."""
    key = np.array([number & (2**64 - 1) for number in (seed, (epoch << 40) | sample)], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key))  # a list of large integers would be converted to float
