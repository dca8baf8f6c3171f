"""A stand-in for the environment server of verifiers: `environment_server.py ADDRESS PIDS [hang]`.

It appends its process id to the file PIDS. A run is answered with the `frames` of its task, (kind, data) each, if it
has any. The method `heard` is answered with the (method, request) of all that came before. With `hang` it hears
nothing.
"""

import os
import sys
import time
from pathlib import Path

import msgspec
import zmq

address, pids, *hang = sys.argv[1:]
with Path(pids).open("a") as file:
    file.write(f"{os.getpid()}\n")
while hang:
    time.sleep(60)
socket = zmq.Context().socket(zmq.ROUTER)
socket.bind(address)
heard = []
while True:
    client, number, method, data = socket.recv_multipart()
    request = msgspec.msgpack.decode(data)
    frames = request.get("task_data", {}).get("frames", ())
    if method in (b"health", b"heard"):
        frames = [(b"reply", msgspec.msgpack.encode({"heard": heard}))]
    for kind, frame in frames:
        socket.send_multipart([client, number, kind, frame])
    heard.append((number.decode(), method.decode(), request))
