# A node: tritonserver, the backend, the server in front of it and `embertide serve`.
#   docker build -f k8s/images/node.Dockerfile -t embertide/node:0.2.0 .
# The server is that of the wheel, or of the base where TRITON says in which folder (docs/install.md):
#   docker build --build-arg BASE=nvcr.io/nvidia/tritonserver:26.08-py3 \
#     --build-arg TRITON=/opt/tritonserver -f k8s/images/node.Dockerfile -t embertide/node:0.2.0 .
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

# torch is here for its libraries: the dense plugin links them where they will lie.
FROM build AS install
# https://download.pytorch.org/whl/cpu here gives a torch without CUDA's libraries.
ARG PIP_EXTRA_INDEX_URL
RUN python3 -m venv /opt/embertide && export PATH=/opt/embertide/bin:$PATH && \
    pip install -q --no-cache-dir --require-hashes -r requirements/node.txt && \
    pip install -q --no-cache-dir -r requirements/torch.txt && \
    pip install -q --no-cache-dir --no-deps /wheels/*.whl && pip check
RUN cmake -S . -B build/cpp -G Ninja -DCMAKE_BUILD_TYPE=RelWithDebInfo -DEMBERTIDE_BUILD_TESTS=OFF \
      -DEMBERTIDE_TORCH="$(echo /opt/embertide/lib/python3*/site-packages/torch)" >/dev/null && \
    cmake --build build/cpp --target triton_embertide embertide_dense_plugin embertide_server && \
    cp -r build/cpp/backends k8s/images/starts.py /opt/embertide/ && \
    cp build/cpp/embertide_server /opt/embertide/bin/
# What of the base all this loads: its packages have other names in each release.
RUN k8s/images/packages.sh /opt/embertide/backends/embertide/*.so /opt/embertide/bin/embertide_server \
      $(find /opt/embertide/lib/python3*/site-packages/embertide -name '*.so') \
      >/opt/embertide/packages

FROM ${BASE}
ARG TRITON
COPY --from=install /opt/embertide/packages /opt/embertide/packages
RUN apt-get update -qq && apt-get install -y -qq --no-install-recommends ca-certificates python3 \
      $(cat /opt/embertide/packages) && \
    rm -rf /var/lib/apt/lists/* && useradd --uid 10001 embertide
COPY --from=install /opt/embertide /opt/embertide
ENV EMBERTIDE_SERVER=/opt/embertide/bin/embertide_server
ENV PATH=/opt/embertide/bin:$PATH EMBERTIDE_BACKENDS=/opt/embertide/backends EMBERTIDE_TRITON=$TRITON
# An image that lacks a library, or whose server does not start, is not built.
RUN ldd /opt/embertide/backends/embertide/*.so $EMBERTIDE_SERVER >/tmp/ldd && ! grep 'not found' /tmp/ldd && \
    rm /tmp/ldd && embertide serve --help >/dev/null && python /opt/embertide/starts.py
ENV HOME=/tmp
USER 10001:10001
# A base may have one of its own.
ENTRYPOINT []
CMD ["embertide", "serve", "--help"]
