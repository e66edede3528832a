# Every target works on a fresh machine: what is missing is set up first.
#   make demo     the main job, live          make test    everything a commit must pass
#   make build    compile what changed        make bench   measure
PYTHON ?= python3
VENV   := .venv
PY     := $(VENV)/bin/python
PIP    := $(PY) -m pip --quiet --disable-pip-version-check
TOOLS  := $(VENV)/tools.stamp
# Another set of backends is another editable install.
STAMP  := $(VENV)/installed-$(shell \
              echo $(UCX_MEMH_BUILD_BACKENDS) backends/*/ucx_memh_*/ | cksum | cut -d' ' -f1).stamp
DIST   := build/dist
# What `make test` runs again on an installed sdist; `make test-dist` runs all.
SMOKE  := tests/test_import.py tests/test_errors.py tests/test_flags.py tests/test_cli_info.py \
          tests/test_demo.py tests/test_pack.py tests/ib_mlx5/test_rows.py tests/embed

.PHONY: setup build demo test suite test-rxe test-gpu test-tsan test-asan costs bench bench-report bench-peers hotpath lint format docs clean test-dist test-dist-smoke
.DELETE_ON_ERROR:
.NOTPARALLEL:  # tests that count and time want the machine for themselves

setup: $(STAMP)

$(TOOLS): pyproject.toml tools/bootstrap.sh
	PYTHON="$(PYTHON)" sh tools/bootstrap.sh
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	@$(PY) -c 'import tomllib; project = tomllib.load(open("pyproject.toml", "rb")); \
	    print(*project["build-system"]["requires"], *project["project"]["dependencies"], \
	          *sum(map(project["project"]["optional-dependencies"].get, ["test", "lint"]), []), \
	          sep="\n")' \
	    > $(VENV)/requirements.txt
	$(PIP) install -r $(VENV)/requirements.txt
	touch $@

# Without the extensions: `build` compiles them in place, and only what changed.
$(STAMP): $(TOOLS)
	rm -f $(VENV)/installed-*.stamp
	UCX_MEMH_EXTENSIONS=0 flock $(VENV) $(PIP) install --no-deps --no-build-isolation -e .
	touch $@

# One at a time: two builds in one tree would write the same files.
build: $(STAMP)
	@flock $(VENV) $(PY) setup.py --quiet build_ext --inplace

demo: build
	$(PY) -m ucx_memh demo $(ARGS)

test: suite test-dist-smoke test-rxe

suite: build $(VENV)/docs.stamp
	$(PY) -m pytest $(ARGS)
	$(if $(wildcard bench/bench_*.py),$(PY) -m pytest -q --benchmark-disable bench)

# In a guest, on the kernel's own RDMA stack.  Importing the two plugins takes half a minute there.
IN_GUEST := tools/guest/run.py --timeout 400 --env PYTHONDONTWRITEBYTECODE=1 -- \
            $(PY) -m pytest -p no:cacheprovider -p no:hypothesispytest -p no:benchmark -o timeout=300

test-rxe: build
	sh tools/guest/setup.sh
	$(PY) -m pytest -m guest tests/guest
	$(PY) $(IN_GUEST) tests/rxe tests/ib $(ARGS)

# On a GPU, with its own driver: a missing one is a failure.
test-gpu: build
	$(PY) -m pytest -m gpu tests/cuda_ipc $(ARGS)

# docs/costs.*: instructions, counted in a guest.
costs: build
	sh tools/guest/setup.sh
	$(PY) tools/guest/costs.py

# A copy of the tree, built with a sanitizer: no report is allowed.  Of the tests those in which
# threads meet, and those in which memory comes and goes; without what takes a thousand times as long.
TSAN_TESTS := tests/test_core_threads.py tests/test_core_completion.py tests/test_rkey_cache.py \
              tests/test_many_revoke.py tests/test_find.py tests/test_core_connections.py \
              tests/ib_mlx5/test_endpoint.py \
              tests/ib_mlx5/test_faults.py tests/ib_mlx5/test_umr.py \
              tests/ib_mlx5/test_umr_faults.py tests/embed/test_races.py \
              tests/cuda_ipc/test_mappings.py tests/cuda_ipc/test_data.py -k 'not 1048576'
ASAN_TESTS := tests/test_core_*.py tests/test_rules.py tests/test_pack.py tests/test_rkey_cache.py \
              tests/test_many.py tests/test_many_revoke.py tests/test_find.py \
              tests/test_model.py tests/test_bundle.py tests/ib_mlx5/test_rows.py \
              tests/ib_mlx5/test_faults.py tests/ib_mlx5/test_umr.py \
              tests/ib_mlx5/test_umr_faults.py tests/ib_mlx5/test_mailbox.py tests/ib/test_rows.py \
              tests/ib/test_faults.py tests/cma/test_keys.py tests/test_buffers.py \
              tests/cuda_ipc/test_keys.py tests/cuda_ipc/test_mappings.py \
              tests/cuda_ipc/test_faults.py

test-tsan: build
	sh tools/sanitize.sh thread -o timeout=300 $(TSAN_TESTS) $(ARGS)

test-asan: build
	sh tools/sanitize.sh address -o timeout=300 $(ASAN_TESTS) $(ARGS)

bench: build
	$(PY) -m pytest bench --benchmark-only $(ARGS)

# docs/bench.*: what all costs here, as a page and pictures, by the extra `report`.
bench-report: build $(VENV)/report.stamp
	$(PY) -m bench.report $(ARGS)

# docs/hotpath.json: the shortest calls, beside their limits.  Without valgrind no instructions are
# counted, and it says so.
hotpath: build
	PYTHON="$(PYTHON)" sh tools/bootstrap.sh valgrind || true
	$(PY) -m bench.hotpath $(ARGS)

# An extra of pyproject.toml that few targets need.
$(VENV)/report.stamp $(VENV)/docs.stamp: $(VENV)/%.stamp: $(TOOLS)
	@$(PY) -c 'import tomllib; project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
	    print(*project["optional-dependencies"]["$*"], sep="\n")' > $(VENV)/$*.txt
	$(PIP) install -r $(VENV)/$*.txt
	touch $@

# docs/peers.*: the same steps with other libraries, which it installs into build/peers.
bench-peers: build
	$(PY) -m bench.peers $(ARGS)

# Of what git has, or of what is there where that is no clone.
C_FILES = $(shell git ls-files '*.c' '*.h' '*.cpp' 2>/dev/null || \
              find ucx_memh backends tests bench -name '*.[ch]' -o -name '*.cpp')

lint: $(TOOLS)
	$(VENV)/bin/ruff check --quiet --output-format concise .
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" cython-lint ucx_memh backends $(wildcard bench)
	$(VENV)/bin/mypy --no-error-summary
	$(VENV)/bin/clang-format --dry-run --Werror $(C_FILES)

format: $(TOOLS)
	$(VENV)/bin/clang-format -i $(C_FILES)

# The site, in build/docs.
docs: build $(VENV)/docs.stamp
	$(PY) -m sphinx --quiet --fail-on-warning -d build/doctrees docs build/docs

# The sdist, built for an empty venv and installed there, where the source tree cannot be seen.
# That finds files that setuptools leaves out, and requirements that pyproject.toml does.
$(DIST)/run: $(TOOLS) FORCE
	rm -rf $(DIST)
	mkdir -p $@
	@# Metadata in the tree itself would be found before those of the installed package, and get old.
	$(PY) setup.py --quiet egg_info --egg-base $(DIST) sdist --dist-dir $(DIST)
	$(PY) -m venv --without-pip $(DIST)/venv
	$(PIP) --python $(DIST)/venv wheel --no-deps --wheel-dir $(DIST) $(DIST)/*.tar.gz
	$(PIP) --python $(DIST)/venv install "$$(echo $(DIST)/*.whl)[test]"
	cp -R tests pyproject.toml $@
.PHONY: FORCE
FORCE:

test-dist test-dist-smoke: $(DIST)/run
	cd $< && ../venv/bin/python -m pytest -m 'not source' $(if $(filter %-smoke,$@),$(SMOKE))

clean:
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .hypothesis .benchmarks
	find ucx_memh backends bench tests -name '*.so' -delete -o -name __pycache__ -prune -exec rm -r {} +
