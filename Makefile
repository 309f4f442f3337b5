# make            release build of build/release/mlxcel and libmlxcel.a
# make run        build, fetch the default model, answer a prompt, chat when on a terminal
# make check      every test, formatting, layers, sizes (no network, no Python)
# SAN=address,undefined | SAN=thread | DEBUG=1   other configurations, each in its own folder
# T=name          with check: only test programs whose path contains name
ifeq ($(origin CC),default)
CC      := gcc
endif
NVCC    ?= $(shell command -v nvcc 2>/dev/null)
AR      ?= ar
comma   := ,
CONFIG  := $(if $(SAN),san-$(subst $(comma),-,$(SAN)),$(if $(DEBUG),debug,release))
B       := build/$(CONFIG)

WARN    := -Wall -Wextra -Wpedantic -Wshadow -Wconversion -Wno-sign-conversion -Wno-overlength-strings
ifdef WERROR
WARN    += -Werror
endif
OPT     := $(if $(SAN),-O1 -g -fsanitize=$(SAN) -fno-omit-frame-pointer -fno-sanitize-recover=all,$(if $(DEBUG),-O0 -g,-O2 -g))
CFLAGS  += -std=c17 $(OPT) $(WARN) -fno-strict-aliasing -ffp-contract=off -pthread -Iinclude -Isrc -I$(B)/gen -D_GNU_SOURCE
VERSION := 0.1.0
CFLAGS  += -DMLXCEL_VERSION='"$(VERSION)"' $(if $(DEBUG)$(SAN),-DMX_DEBUG_HOOKS)
# Static archives where the distribution has them, so that the binary runs elsewhere too.
static   = $(if $(wildcard $(foreach d,/usr/lib/x86_64-linux-gnu /usr/lib/aarch64-linux-gnu /usr/lib,$(d)/lib$(1).a)),-l:lib$(1).a,-l$(1))
LDLIBS  += $(call static,jansson) $(call static,pcre2-8) $(call static,utf8proc) -lm -ldl -pthread
LDFLAGS += $(if $(SAN),-fsanitize=$(SAN)) -pthread

MODULES := base tensor format backend backend/cpu backend/cuda text kv sample nn model model/families engine server cli
SRC     := $(foreach m,$(MODULES),$(wildcard src/$(m)/*.c))
# Kernels built once per instruction set: src/backend/cpu/k_*.c
KSRC    := $(wildcard src/backend/cpu/k_*.c)
CSRC    := $(filter-out $(KSRC) src/cli/main.c,$(SRC))
ARCH    := $(shell uname -m)
ifeq ($(ARCH),x86_64)
ISAS    := scalar avx2 avx512
else
ISAS    := scalar
endif
FLAGS_scalar := -DMX_ISA=scalar -DMX_ISA_SCALAR=1
FLAGS_avx2   := -DMX_ISA=avx2 -DMX_ISA_AVX2=1 -mavx2 -mfma -mf16c -mbmi -mbmi2
FLAGS_avx512 := -DMX_ISA=avx512 -DMX_ISA_AVX512=1 -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512vnni -mfma -mf16c -mbmi -mbmi2
KOPT    := $(if $(SAN),,-O3)
OBJ     := $(CSRC:%.c=$(B)/obj/%.o) $(foreach i,$(ISAS),$(KSRC:%.c=$(B)/obj/%.$(i).o))
TESTS   := $(wildcard tests/unit/test_*.c tests/ops/test_*.c tests/golden/test_*.c tests/server/test_*.c)
TBIN    := $(TESTS:%.c=$(B)/%)

-include Makefile.local

.PHONY: all run check tests clean fuzz check-clients check-references check-cuda format
all: $(B)/mlxcel compile_commands.json

-include $(wildcard src/backend/cuda/cuda.mk) $(wildcard tools/*.mk)

$(B)/mlxcel: $(B)/obj/src/cli/main.o $(B)/libmlxcel.a
	$(CC) $(LDFLAGS) -o $@ $^ $(LDLIBS)
$(B)/libmlxcel.a: $(OBJ)
	@rm -f $@
	$(AR) rcs $@ $^

$(B)/obj/%.o: %.c
	@mkdir -p $(dir $@)
	$(CC) $(CFLAGS) -MMD -MP -c -o $@ $<
define isa_rule
$(B)/obj/%.$(1).o: %.c
	@mkdir -p $$(dir $$@)
	$$(CC) $$(filter-out -Wconversion,$$(CFLAGS)) $$(KOPT) $$(FLAGS_$(1)) -MMD -MP -c -o $$@ $$<
endef
$(foreach i,$(ISAS),$(eval $(call isa_rule,$(i))))

tests: $(TBIN)
$(B)/tests/%: tests/%.c $(B)/libmlxcel.a
	@mkdir -p $(dir $@)
	$(CC) $(CFLAGS) -Itests -MMD -MP -MF $@.d -MT $@ $(LDFLAGS) -o $@ $< $(B)/libmlxcel.a -lcmocka $(LDLIBS)

clean:
	rm -rf build compile_commands.json
-include $(OBJ:.o=.d) $(TBIN:=.d) $(B)/obj/src/cli/main.d
