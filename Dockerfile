# `weft serve` in a container, as an ordinary user.
#
#   docker build -t weft-serve .                                   (on a GPU: run it with --gpus all)
#   docker build -t weft-serve --build-arg TORCH_INDEX=ADDRESS .   (of an index of PyTorch builds for CPUs: smaller)
#   docker run --rm -p 127.0.0.1:8000:8000 -e WEFT_TOKEN=at-least-sixteen-letters -v "$PWD/runs:/runs:ro" weft-serve /runs/mine
#
# Without a run it serves the demo. Others reach the container's address, so there has to be a token.

ARG PYTHON=3.12
FROM python:${PYTHON}-slim-bookworm AS build
ARG TORCH_INDEX=
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
WORKDIR /source
RUN python -m venv /weft && /weft/bin/pip install --no-cache-dir --upgrade "pip>=25"
# torch first and by itself: it is large, and stays in the cache while the source changes.
RUN /weft/bin/pip install --no-cache-dir ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "torch>=2.11" "torchvision>=0.26"
COPY pyproject.toml README.md LICENSE MANIFEST.in ./
COPY weft ./weft
RUN /weft/bin/pip install --no-cache-dir ".[serve]"

FROM python:${PYTHON}-slim-bookworm
RUN useradd --system --uid 10001 --no-create-home weft
COPY --from=build /weft /weft
ENV PATH=/weft/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    HF_HUB_OFFLINE=1 \
    MPLCONFIGDIR=/tmp
USER 10001
WORKDIR /tmp
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=3s --start-period=60s \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/ready', timeout=2)"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["weft", "serve", "--host", "0.0.0.0", "--port", "8000"]
CMD ["demo"]
