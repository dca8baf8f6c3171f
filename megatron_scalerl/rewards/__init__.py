"""Scores of completions.

pool.py            asyncio pool of verifier processes; runs in the controller
worker_process.py  starts, feeds and kills one of them; runs in the controller
worker.py          main of a verifier process: loads the verifier, runs checks
limits.py          resource limits of a check, applied in the verifier process
math.py            the verifier `math`; magnitude.py refuses huge numbers for it
"""
