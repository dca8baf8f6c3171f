"""Rollouts of training.

stream.py        starts groups and returns batches; gate.py bounds the staleness, engine_loads.py chooses engines
sampler.py       makes one completion, from request to score
plans.py         makes the settings of requests to engines, and the rule that finds the answer in a completion
decoder_pool.py  processes that decode the engines' responses; runs in the controller
decoder.py       main of a decoder process; applies the rule that finds the answer
journal.py       records which groups were drawn, finished and put into batches; history.py reads the journal
store.py         finished groups on the disk; group_files.py lists the stored groups for people
retention.py     deletes stored groups that no resume needs
"""
