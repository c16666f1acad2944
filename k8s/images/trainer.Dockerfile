# A trainer under torchrun. It compiles dense programs, hence the compiler and Python's headers.
#   docker build -f k8s/images/trainer.Dockerfile -t embertide/trainer:0.2.0 .
# A release names it by digest: --build-arg BASE=docker.io/library/debian@sha256:... (docs/security.md).
ARG BASE=docker.io/library/debian:12

# The wheel. All images begin like this, so that one build serves the next as a cache.
FROM ${BASE} AS build
WORKDIR /src
RUN apt-get update -qq && apt-get install -y -qq --no-install-recommends ca-certificates make python3
COPY Makefile .
RUN make build/.apt
COPY . .
RUN python3 -m venv /opt/build && export PATH=/opt/build/bin:$PATH && \
    pip install -q --no-cache-dir --require-hashes -r requirements/build.txt && \
    pip wheel -q --no-cache-dir --no-build-isolation --no-deps --wheel-dir /wheels .

FROM build AS install
# https://download.pytorch.org/whl/cpu here gives a torch without CUDA's libraries.
ARG PIP_EXTRA_INDEX_URL
RUN python3 -m venv /opt/embertide && export PATH=/opt/embertide/bin:$PATH && \
    pip install -q --no-cache-dir --require-hashes -r requirements/trainer.txt && \
    pip install -q --no-cache-dir -r requirements/torch.txt && \
    pip install -q --no-cache-dir --no-deps /wheels/*.whl && pip check

FROM ${BASE}
RUN apt-get update -qq && apt-get install -y -qq --no-install-recommends ca-certificates python3 \
      g++ libaio1 libisal2 liburing2 python3-dev && \
    rm -rf /var/lib/apt/lists/* && useradd --uid 10001 embertide
COPY --from=install /opt/embertide /opt/embertide
ENV PATH=/opt/embertide/bin:$PATH
# An image that lacks a library is not built.
RUN python -m embertide.trainer --help >/dev/null && \
    python -m embertide.trainer.sync.launch --help >/dev/null
ENV HOME=/tmp
USER 10001:10001
CMD ["python", "-m", "embertide.trainer.sync.launch", "--help"]
