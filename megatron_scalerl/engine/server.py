"""The main program of an engine's server process: vLLM's OpenAI server on a socket that the controller has bound.

    MSRL_LISTEN_FD=3 MSRL_READY_FD=4 MSRL_SECRET=... python -m megatron_scalerl.engine.server --model ...

The arguments are vLLM's own. vLLM's entry points are not used: `vllm serve` requires a distribution named vllm, and
all entry points bind the address, so that a port which the controller found free could be taken meanwhile. vLLM is
imported inside the functions, since a core that vLLM spawns imports this module again.
"""

import os
import signal
import socket
from argparse import Namespace
from types import FrameType

from megatron_scalerl.processes.logs import log_to_stderr
from megatron_scalerl.processes.parent_death import tie_forked_children


def main() -> None:
    """Serve until SIGTERM."""
    tie_forked_children()
    sock = socket.socket(fileno=int(os.environ.pop("MSRL_LISTEN_FD")))
    sock.set_inheritable(False)
    os.set_inheritable(int(os.environ["MSRL_READY_FD"]), False)

    import uvloop
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    from vllm.logger import configure_logging_from_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from megatron_scalerl.engine.vllm_progress import count_tokens

    cli_env_setup()
    arguments = make_arg_parser(FlexibleArgumentParser(description=__doc__)).parse_args()
    configure_logging_from_args(arguments)
    log_to_stderr("vllm")
    validate_parsed_serve_args(arguments)
    count_tokens()
    uvloop.run(_serve(arguments, sock))


async def _serve(arguments: Namespace, sock: socket.socket) -> None:
    from vllm.entrypoints.launchers.api_server.entry import run_server_worker
    from vllm.entrypoints.launchers.launcher import validate_api_server_args
    from vllm.utils.system_utils import decorate_logs, set_ulimit

    decorate_logs("APIServer", skip_if_decorated=True)
    # This handler is for the start-up; vLLM's server later installs a handler for SIGTERM.
    signal.signal(signal.SIGTERM, _interrupt)
    validate_api_server_args(arguments)
    set_ulimit()
    scheme = "https" if arguments.ssl_certfile else "http"
    await run_server_worker(f"{scheme}://{arguments.host}:{arguments.port}", sock, arguments)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt(signal.Signals(number).name)


if __name__ == "__main__":
    main()
