# A node: tritonserver (the wheel's), the backend and `embertide serve`.
#   docker build -f k8s/images/node.Dockerfile -t embertide/node:0.1.0 .
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
    cmake --build build/cpp --target triton_embertide embertide_dense_plugin && \
    cp -r build/cpp/backends /opt/embertide/

FROM ${BASE}
RUN apt-get update -qq && apt-get install -y -qq --no-install-recommends ca-certificates python3 \
      libaio1 libb64-0d libgrpc++1.51 libhiredis0.14 libisal2 libprotobuf32 liburing2 && \
    rm -rf /var/lib/apt/lists/* && useradd --uid 10001 embertide
COPY --from=install /opt/embertide /opt/embertide
ENV PATH=/opt/embertide/bin:$PATH EMBERTIDE_BACKENDS=/opt/embertide/backends
# An image that lacks a library is not built.
RUN site=$(echo /opt/embertide/lib/python3*/site-packages) && \
    LD_LIBRARY_PATH=$site/nvidia_pytriton.libs ldd /opt/embertide/backends/embertide/*.so \
      "$site/pytriton/tritonserver/bin/tritonserver" >/tmp/ldd && \
    ! grep 'not found' /tmp/ldd && rm /tmp/ldd && embertide serve --help >/dev/null
ENV HOME=/tmp
USER 10001:10001
CMD ["embertide", "serve", "--help"]
