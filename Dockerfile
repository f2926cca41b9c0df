# An image of hf_axonn on a base image that you choose.
#
#     docker build --build-arg BASE=pytorch/pytorch:2.13.0-cuda13.0-cudnn9-runtime --tag hf-axonn .
#     docker build --build-arg BASE=rocm/pytorch:rocm7.14_ubuntu24.04_py3.12_pytorch_release_2.11.0 --tag hf-axonn .
#     docker build --build-arg BASE=python:3.12-slim \
#         --build-arg PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu --tag hf-axonn .
#
#     docker run --rm --gpus all --shm-size 16g --volume "$PWD:/home/axonn" hf-axonn finetune --config axonn.yaml ...
#
# BASE needs Python 3.11 or newer with pip. A torch that it has is kept, and has to be of a release that hf_axonn is
# proven with; without one, pip installs it. docs/install.md says more.
ARG BASE=python:3.12-slim

FROM python:3.12-slim AS wheel
WORKDIR /source
COPY LICENSE README.md pyproject.toml setup.cfg setup.py ./
COPY eval eval
COPY hf_axonn hf_axonn
COPY training_scripts training_scripts
RUN python3 -m pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM ${BASE}
ARG EXTRAS=data,peft,trl,eval
ARG PIP_EXTRA_INDEX_URL
# Python of Ubuntu 24.04 takes packages of pip only so; in an image nobody else looks after them.
ENV PIP_BREAK_SYSTEM_PACKAGES=1
COPY --from=wheel /wheels /wheels
# Releases are bounded in setup.cfg; the torch of BASE, a build for its GPUs, is not exchanged for another.
RUN python3 -c "import importlib.metadata as m; print(*['torch==' + d.version for d in m.distributions(name='torch')])" \
        > /wheels/constraints.txt \
    && python3 -m pip install --no-cache-dir --constraint /wheels/constraints.txt \
        "hf_axonn[${EXTRAS}] @ file://$(echo /wheels/hf_axonn-*.whl)" \
    && mkdir -p /home/axonn && chown 1000:1000 /home/axonn
# By number: Ubuntu 24.04 has a user 1000 of its own, others have none. torch asks for a home and a name.
ENV HOME=/home/axonn USER=axonn
USER 1000:1000
WORKDIR /home/axonn
ENTRYPOINT ["hf-axonn"]
CMD ["--help"]
