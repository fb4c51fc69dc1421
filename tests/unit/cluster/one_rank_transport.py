"""A transport of a user's own that several trainer ranks cannot use. Its facts are read, and it is never made."""


class OneRank:
    for_ranks = False
