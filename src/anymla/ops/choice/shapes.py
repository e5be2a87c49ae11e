"""Named shapes of the greedy choice: vocabularies, shares of them, and the drafter's rank."""

VOCAB = 129280
# GPUs among which the vocabulary is shared.
RANKS = (1, 2, 4, 8)
# Columns of V4-Flash-0731's Markov tables.
MARKOV_RANK = 256
# Rows of a step: requests, or their tokens with drafts.
ROWS = (1, 6, 48)
# Channels of a token that ranks add.
HIDDEN = 4096
