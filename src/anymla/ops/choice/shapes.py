"""Named shapes of the greedy choice: vocabularies, ranks' parts of them, the drafter's rank."""

VOCAB = 129280
# Numbers of GPUs among which the vocabulary is divided.
RANKS = (1, 2, 4, 8)
# Columns of V4-Flash-0731's Markov tables.
MARKOV_RANK = 256
# Rows of a step: one for each request, or for its tokens with drafts.
ROWS = (1, 6, 48)
# Channels of a token's tensor that ranks add up.
HIDDEN = 4096
