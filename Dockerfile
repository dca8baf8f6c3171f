# The GPU environment as an image. NOT BUILT by the authors: read and linted only.
#
#   docker build --tag megatron-scalerl .
#
# NVIDIA's PyTorch image for the CUDA toolkit, the compilers and the network libraries of a GPU machine; 25.11 is the last
# monthly release on CUDA 13.0, the CUDA that torch 2.13.0 on the package index is built for (25.12 has CUDA 13.1), with
# Python 3.12. Its own torch is 2.10, which vLLM 0.32.0 does not work with: the locked packages go into a virtual environment
# of their own, torch among them, and nothing of the image's Python is used. Any image with nvcc of CUDA 13.0 and
# Python 3.12 with its headers serves as well.
ARG BASE_IMAGE=nvcr.io/nvidia/pytorch:25.11-py3
FROM ${BASE_IMAGE}

# The image's constraints would hold packages at its own versions, and its libraries' folder holds a libtorch of its own.
ENV PIP_CONSTRAINT="" \
    PIP_NO_CACHE_DIR=1 \
    PYTHONPATH="" \
    PYTHONNOUSERSITE=1 \
    LD_LIBRARY_PATH=/usr/local/cuda/compat/lib:/usr/local/nvidia/lib:/usr/local/nvidia/lib64 \
    CUDA_HOME=/usr/local/cuda

SHELL ["/bin/bash", "-o", "pipefail", "-c"]

# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends python3.12-venv python3.12-dev g++ \
    && rm -rf /var/lib/apt/lists/*

# Files that are mounted belong to this user: give the numbers of whoever will run the image.
ARG USER_ID=1000
ARG GROUP_ID=1000
RUN (getent group "${GROUP_ID}" || groupadd --gid "${GROUP_ID}" trainer) \
    && (getent passwd "${USER_ID}" || useradd --uid "${USER_ID}" --gid "${GROUP_ID}" --create-home trainer) \
    && install --directory --owner="${USER_ID}" --group="${GROUP_ID}" /opt/megatron_scalerl
USER ${USER_ID}:${GROUP_ID}
WORKDIR /opt/megatron_scalerl

# A layer of its own for 248 packages: it is made again where a lock changes, not where the code does. install.sh installs the
# package itself too, so it gets a stand-in, which the next copy replaces.
COPY --chown=${USER_ID}:${GROUP_ID} setup.cfg pyproject.toml README.md LICENSE ./
COPY --chown=${USER_ID}:${GROUP_ID} tools/install.sh tools/install_checks.sh tools/find_python.sh tools/
COPY --chown=${USER_ID}:${GROUP_ID} tools/locks tools/locks
ARG MAX_JOBS=
RUN mkdir megatron_scalerl \
    && touch megatron_scalerl/__init__.py \
    && MSRL_PYTHON=/usr/bin/python3.12 tools/install.sh gpu --without-gpu

COPY --chown=${USER_ID}:${GROUP_ID} . .

# Kernels that are compiled at run time are cached in the user's home, never in a /tmp that others may share.
ENV PATH=/opt/megatron_scalerl/.venv/bin:${PATH} \
    VIRTUAL_ENV=/opt/megatron_scalerl/.venv
CMD ["megatron-scalerl", "--help"]
