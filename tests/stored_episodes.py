"""Episodes of three turns, in tokens of the tiny tokenizer, and a segment of a store from before there were any."""

from rollout_groups import rollout

EPISODE = rollout(
    tokens=(13, 5, 4, 8, 19, 6, 2, 16, 8, 15, 2),
    mask=map(bool, map(int, "10000110111")),
    logprobs=(-0.5, *(0.0,) * 4, -0.25, -1.0, 0.0, -2.0, -0.75, -0.125),
    versions=(3,) * 7 + (4,) * 4,
    interrupted=True,
    thinking_cut=1,
    environment=((3, 5), (7, 8)),
)
"""7 and the forced phrase, 2= of the environment; 0 and the end, + of the environment; 29 and the end."""

FORKED = (
    rollout(
        tokens=(13, 5, 4),
        mask=(True, False, False),
        logprobs=(-0.5, 0.0, 0.0),
        versions=(3,) * 3,
        interrupted=True,
        thinking_cut=1,
    ),
    rollout(
        tokens=(4, 8, 19, 6, 2),
        mask=(False, False, False, True, True),
        logprobs=(0.0, 0.0, 0.0, -0.25, -1.0),
        versions=(3,) * 5,
        environment=((0, 3),),
    ),
    rollout(
        tokens=(4, 8, 19, 2, 16, 8, 15, 2),
        mask=(False,) * 5 + (True,) * 3,
        logprobs=(0.0,) * 5 + (-2.0, -0.75, -0.125),
        versions=(4,) * 8,
        environment=((0, 5),),
    ),
)
"""The same turns, each a part of its own that begins with the history without its thinking."""

BEFORE = rollout(
    tokens=(5, 6, 7, 8),
    logprobs=(-0.5, -0.25, 0.0, -1.0),
    versions=(3, 3, 3, 4),
    mask=(True, True, False, True),
    interrupted=True,
    thinking_cut=2,
    seed=11,
)
"""The first completion of SEGMENT_BEFORE."""

SEGMENT_BEFORE = bytes.fromhex(
    """
    4d53524c5345474d0100000080021a76475255501a02f889e3020000000000000000000000000000ff01000002000000680000000000
    0000ef5243234400000000000000dbd50b8e7b2270726f6d7074223a7b2270726f6d70745f6964223a227030222c2274657874223a22
    312b323d222c22616e73776572223a2233222c22746f6b656e5f696473223a5b312c325d2c226578747261223a7b7d2c227461736b22
    3a22227d2c2265706f6368223a302c2266697273745f746f6b656e5f76657273696f6e223a332c226c6f73745f636f6d706c6574696f
    6e73223a302c2273636f726573223a5b7b22636f7272656374223a747275652c22726577617264223a312e302c22726561736f6e223a
    22227d2c7b22636f7272656374223a66616c73652c22726577617264223a2d312e302c22726561736f6e223a22227d5d2c22636f6d70
    6c6574696f6e73223a5b7b22746f6b656e73223a342c2273616d706c65645f746f6b656e73223a332c2266697273745f76657273696f
    6e223a332c226c6173745f76657273696f6e223a342c22696e746572727570746564223a747275652c227472756e6361746564223a66
    616c73652c226c6f6770726f625f73756d223a2d312e37357d2c7b22746f6b656e73223a322c2273616d706c65645f746f6b656e7322
    3a322c2266697273745f76657273696f6e223a342c226c6173745f76657273696f6e223a342c22696e746572727570746564223a6661
    6c73652c227472756e6361746564223a66616c73652c226c6f6770726f625f73756d223a2d312e307d5d7d0101000004000000020000
    0001000000020000000b0000000000000000000000000000000000000003000000000000000300000004000000000000000100000002
    0000000300000005000000060000000700000008000000000000bf000080be00000000000080bf010000000200000001000000000000
    00000000000c000000000000000000000000000000000000000400000000000000020000000900000002000000000000bf000000bf
    """
)
"""A segment with one group of two completions, as it was written before a block could have parts."""
