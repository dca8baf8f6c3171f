"""Weight transfer from the trainer to the engines.

source.py       the trainer's weights as Hugging Face tensors, gathered from all ranks
connection.py   what both sides must know to connect, and the report of a send
transport/      the broadcast group, over gloo or NCCL
digest.py       the digest by which both sides compare what was sent and received
"""
