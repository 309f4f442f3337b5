# The CUDA backend: kernels to fatbins, embedded in one object. Without nvcc: a stand-in.
# CUDA_ARCHS="90a" shortens a build for one kind of GPU.
# Test configurations compile for one kind only: nothing of it runs where there is no GPU.
CUDA_ARCHS ?= $(if $(WERROR)$(SAN),90a,80 90a 100 120)
CUDA_PTX   ?= $(if $(WERROR)$(SAN),,80)
# Fatbins do not depend on the configuration: every build folder of a checkout shares them.
space      := $(subst ,, )
CUDA_DIR   ?= build/cuda-$(subst $(space),-,$(strip $(CUDA_ARCHS)))
ifneq ($(filter backend/cuda,$(MODULES)),)
ifneq ($(NVCC),)
CUDA_HOME  ?= $(patsubst %/bin/nvcc,%,$(realpath $(NVCC)))
CUDA_CU    := $(wildcard src/backend/cuda/kernels/*.cu)
CUDA_FAT   := $(CUDA_CU:src/backend/cuda/kernels/%.cu=$(CUDA_DIR)/%.fatbin)
CUDA_GEN   := $(foreach a,$(CUDA_ARCHS),-gencode arch=compute_$(a),code=sm_$(a)) \
              $(foreach a,$(CUDA_PTX),-gencode arch=compute_$(a),code=compute_$(a))
CUDA_INC   := $(if $(wildcard $(CUDA_HOME)/include/cuda.h),-isystem $(CUDA_HOME)/include)
OBJ        += $(B)/obj/src/backend/cuda/images.o
$(B)/obj/src/backend/cuda/%.o $(B)/tests/ops/bench_cuda: CFLAGS += $(CUDA_INC)
$(B)/tests/ops/test_upload $(B)/tests/unit/test_oom: CFLAGS += $(CUDA_INC) -DMX_TEST_CUDA_HOST
$(CUDA_DIR)/%.fatbin: src/backend/cuda/kernels/%.cu $(wildcard src/backend/cuda/kernels/*.cuh) src/backend/cuda/kargs.h
	@mkdir -p $(dir $@)
	$(if $(V),,@echo "  NVCC  $<")
	$(Q)$(NVCC) -std=c++17 -O3 $(NVCCFLAGS) $(CUDA_GEN) -fatbin -o $@ $< || \
	    { echo "nvcc failed; what it needs is in docs/cuda.md; NVCC= builds for the CPU only" >&2; exit 1; }
# One assembly file: the images, a table of them, and the list of architectures.
$(B)/gen/cuda/archs: FORCE
	@$(call keep,$(CUDA_ARCHS) $(CUDA_PTX) $(CUDA_FAT))
$(B)/gen/cuda/images.S: $(CUDA_FAT) $(B)/gen/cuda/archs
	@mkdir -p $(dir $@)
	@{ i=0; echo '.section .rodata'; for f in $(CUDA_FAT); do \
	    printf '.balign 64\nimage%d: .incbin "%s"\nname%d: .asciz "%s"\n' \
	    $$i $$f $$i $$(basename $$f .fatbin); i=$$((i+1)); done; \
	  printf '.globl cuda_archs\ncuda_archs: .asciz "%s"\n' '$(strip $(foreach a,$(CUDA_ARCHS),sm_$(a)) $(foreach a,$(CUDA_PTX),compute_$(a)))'; \
	  printf '.section .data.rel.ro,"aw"\n.balign 8\n.globl cuda_images\ncuda_images:\n'; \
	  j=0; while [ $$j -lt $$i ]; do printf '.quad image%d\n' $$j; j=$$((j+1)); done; \
	  printf '.quad 0\n.globl cuda_image_names\ncuda_image_names:\n'; \
	  j=0; while [ $$j -lt $$i ]; do printf '.quad name%d\n' $$j; j=$$((j+1)); done; \
	  printf '.section .note.GNU-stack,"",%%progbits\n'; } > $@
$(B)/obj/src/backend/cuda/images.o: $(B)/gen/cuda/images.S
	@mkdir -p $(dir $@)
	$(CC) -c -o $@ $<
else
# NVIDIA's packages leave the PATH to the user; who gives NVCC= knows.
ifeq ($(origin NVCC),file)
CUDA_HINT  := $(if $(wildcard /usr/local/cuda/bin/nvcc), (there is /usr/local/cuda/bin/nvcc: \
              put its folder on the PATH), (for a GPU: docs/cuda.md))
endif
OBJ        := $(filter-out $(B)/obj/src/backend/cuda/%.o,$(OBJ)) $(B)/obj/src/backend/cuda/stub/none.o
$(if $(filter 0,$(MAKELEVEL)),$(info no nvcc: the program is built without CUDA$(CUDA_HINT)))
endif
endif

# The speed of the ops and of whole steps; needs a GPU to say anything.
.PHONY: bench-cuda
bench-cuda: $(B)/tests/ops/bench_cuda
	$<
# A stand-in for the driver, of today and of before CUDA 12.0.
$(B)/data/stub-driver/libcuda.so.1 $(B)/data/stub-driver-old/libcuda.so.1: tests/ops/stub_driver.c
	@mkdir -p $(@D)
	$(Q)$(CC) -std=c17 $(if $(findstring old,$@),-DSTUB_OLD) -fPIC -shared -Wl,-soname,libcuda.so.1 \
	    -o $@ $<
$(B)/tests/ops/test_cuda_driver: | $(B)/data/stub-driver/libcuda.so.1 \
                                   $(B)/data/stub-driver-old/libcuda.so.1
# And one that has a GPU.
$(B)/data/stub-gpu/libcuda.so.1: tests/ops/stub_gpu.c
	@mkdir -p $(@D)
	$(Q)$(CC) -std=c17 -D_GNU_SOURCE -fPIC -shared -pthread -Wl,-soname,libcuda.so.1 -o $@ $<
$(B)/tests/ops/test_cuda_host $(B)/tests/server/test_device: | $(B)/data/stub-gpu/libcuda.so.1
.PHONY: check-cuda
check-cuda: $(addprefix $(B)/tests/ops/,test_cuda test_cuda_fixed test_cuda_sample test_cuda_driver \
            test_cuda_once test_cuda_fused test_cuda_switches)
	@failed=; for t in $^; do echo $$t; $$t > $(B)/check-cuda.log 2>&1 || failed=1; \
	cat $(B)/check-cuda.log; grep -q SKIPPED $(B)/check-cuda.log && failed=1 && \
	echo "$$t: skipped, so not tested: is there a GPU, and was this built with nvcc?"; \
	done; test -z "$$failed"
# Every kernel once under compute-sanitizer: memory, races in shared memory, barriers.
SANITIZER ?= compute-sanitizer
.PHONY: check-cuda-sanitizer
check-cuda-sanitizer: $(B)/tests/ops/test_cuda_once
	@failed=; for t in memcheck racecheck synccheck; do echo $$t; \
	$(SANITIZER) --tool $$t --error-exitcode 9 $< || failed=1; done; test -z "$$failed"
