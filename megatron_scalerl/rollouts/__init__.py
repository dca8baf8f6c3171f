"""Rollouts of training.

stream.py        admission and batches; gate.py bounds the staleness, engine_loads.py chooses engines
sampler.py       one completion from request to score
plans.py         requests to the engines, and the place of the answer
decoder_pool.py  processes that decode the engines' responses; runs in the controller
decoder.py       main of a decoder process; finds the answer
journal.py       groups drawn, finished and trained; history.py reads the journal
store.py         finished groups on disk
retention.py     deletion of groups that no resume needs; group_files.py lists the stored groups for people
"""
