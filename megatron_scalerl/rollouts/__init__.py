"""Rollouts of training.

stream.py        admission and batches; gate.py bounds their staleness, engine_loads.py chooses engines
sampler.py       one completion from request to score
plans.py         what is asked of the engines, and where the answer is
decoder_pool.py  processes that decode the engines' responses; runs in the controller
decoder.py       main of one of them; finds the answer
journal.py       groups drawn, finished and trained; history.py reads it
store.py         finished groups on disk
retention.py     which of them stay; group_files.py lists them for people
"""
