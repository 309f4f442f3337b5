# make            release build: build/release/mlxcel and libmlxcel.a (V=1 shows the commands)
# make run        build, fetch the default model, answer PROMPT=, chat when on a terminal
# make check      every test, format, layers, sizes, banned words (no network, no Python)
# make fuzz T=gguf SECONDS=60      libFuzzer on tests/fuzz/fuzz_gguf.c, by clang
# make format docs install clean help; check-clients: the real clients of the server
# DEBUG=1 | SAN=address,undefined | SAN=thread   other configurations, each in its own folder
# T=name          with check: only what has name in its path
ifeq ($(origin CC),default)
CC      := gcc
endif
NVCC    ?= $(shell command -v nvcc 2>/dev/null)
AR      ?= ar
Q       := $(if $(V),,@)
comma   := ,
CONFIG  := $(if $(SAN),san-$(subst $(comma),-,$(SAN)),$(if $(DEBUG),debug,release))
B       := build/$(CONFIG)$(if $(WERROR),-check)

WARN    := -Wall -Wextra -Wpedantic -Wshadow -Wconversion -Wno-sign-conversion
WARN    += -Wno-overlength-strings
# Errors for the compilers that the sources are kept clean for; others know other warnings, and gcc
# guesses wrong about uninitialised variables in instrumented code.
ifeq ($(WERROR)$(SAN),1)
WARN    += $(shell $(CC) --version | grep -qE '^(gcc|cc).* 12\.|clang version 14\.' && echo -Werror)
endif
ifdef SAN
OPT     := -O1 -g -fsanitize=$(SAN) -fno-omit-frame-pointer -fno-sanitize-recover=all
else
OPT     := $(if $(DEBUG),-O0 -g,-O2 -g)
endif
VERSION := 0.1.0
CFLAGS  += -std=c17 $(OPT) $(WARN) -fno-strict-aliasing -ffp-contract=off -pthread
CFLAGS  += -Iinclude -Isrc -I$(B)/gen -D_GNU_SOURCE -DMLXCEL_VERSION='"$(VERSION)"'
CFLAGS  += $(if $(DEBUG)$(SAN),-DMX_DEBUG_HOOKS)
# Static archives where the distribution has them, so that the binary runs elsewhere too.
libdirs := /usr/lib/$(shell uname -m)-linux-gnu /usr/lib
static   = $(if $(wildcard $(libdirs:%=%/lib$(1).a)),-l:lib$(1).a,-l$(1))
edit    := edit $(if $(wildcard $(libdirs:%=%/libedit.a)),bsd md tinfo)
LDLIBS  += $(foreach l,jansson pcre2-8 utf8proc $(edit),$(call static,$(l))) -lm -ldl -pthread
LDFLAGS += $(if $(SAN),-fsanitize=$(SAN)) -pthread

MODULES := base tensor format backend backend/cpu backend/cuda text kv sample nn model
MODULES += model/families engine server cli
SRC     := $(foreach m,$(MODULES),$(wildcard src/$(m)/*.c))
MAIN    := $(filter src/cli/main.c,$(SRC))
PROGRAM := $(if $(MAIN),$(B)/mlxcel)
# Kernels, built once per instruction set: src/backend/cpu/k_*.c
KSRC    := $(wildcard src/backend/cpu/k_*.c)
CSRC    := $(filter-out $(KSRC) $(MAIN),$(SRC))
ISAS    := scalar $(if $(filter x86_64,$(shell uname -m)),avx2 avxvnni avx512)
FLAGS_scalar := -DMX_ISA=scalar -DMX_ISA_SCALAR=1
FLAGS_avx2   := -DMX_ISA=avx2 -DMX_ISA_AVX2=1 -mavx2 -mfma -mf16c -mbmi -mbmi2
FLAGS_avxvnni := $(subst MX_ISA=avx2,MX_ISA=avxvnni,$(FLAGS_avx2)) -DMX_ISA_AVXVNNI=1 -mavxvnni
KSRC_avxvnni  := $(patsubst %,src/backend/cpu/k_%.c,matmul matmul_int table)
FLAGS_avx512 := -DMX_ISA=avx512 -DMX_ISA_AVX512=1 -mavx512f -mavx512bw -mavx512dq -mavx512vl
FLAGS_avx512 += -mavx512vnni -mfma -mf16c -mbmi -mbmi2
KOPT    := $(if $(SAN),,-O3)
KFLAGS   = $(filter-out -Wconversion,$(CFLAGS)) $(KOPT) $(FLAGS_$(1))
# the kernels first: they take the longest
OBJ     := $(foreach i,$(ISAS),$(patsubst %.c,$(B)/obj/%.$(i).o,$(or $(KSRC_$(i)),$(KSRC))))
OBJ     += $(CSRC:%.c=$(B)/obj/%.o)

# After a failed build: go on with what did compile, see `check`.
ifdef PARTIAL
OBJ     := $(wildcard $(OBJ))
endif

-include Makefile.local

.PHONY: all FORCE
.DELETE_ON_ERROR:
.SECONDARY:
all: $(PROGRAM) $(B)/libmlxcel.a compile_commands.json

-include $(wildcard src/backend/cuda/cuda.mk) $(wildcard tools/*.mk)

$(B)/mlxcel: $(B)/obj/src/cli/main.o $(B)/libmlxcel.a
	$(if $(V),,@echo "  LD    $@")
	$(Q)$(CC) $(LDFLAGS) -o $@ $^ $(LDLIBS)
$(B)/libmlxcel.a: $(OBJ) $(B)/members
	$(if $(V),,@echo "  AR    $@")
	@rm -f $@
	$(Q)$(AR) rcs $@ $(OBJ)

$(B)/obj/%.o: %.c $(B)/flags
	@mkdir -p $(@D) && rm -f $@
	$(if $(V),,@echo "  CC    $<")
	$(Q)$(CC) $(CFLAGS) -MMD -MP -c -o $@ $<
define isa_rule
$(B)/obj/%.$(1).o: %.c $(B)/flags
	@mkdir -p $$(@D) && rm -f $$@
	$(if $(V),,@echo "  CC    $$< ($(1))")
	$(Q)$$(CC) $$(call KFLAGS,$(1)) -MMD -MP -c -o $$@ $$<
endef
$(foreach i,$(ISAS),$(eval $(call isa_rule,$(i))))

# Rewritten only when they change: other flags rebuild the objects, other files the archive.
quote    = '$(subst ','\'',$(1))'
keep     = mkdir -p $(@D) && printf '%s\n' $(call quote,$(1)) > $@.new && \
           if cmp -s $@.new $@; then rm $@.new; else mv $@.new $@; fi
$(B)/flags: FORCE
	@$(call keep,$(CC) $(CFLAGS) $(KOPT) $(foreach i,$(ISAS),$(FLAGS_$(i))))
$(B)/members: FORCE
	@$(call keep,$(OBJ))

-include $(OBJ:.o=.d) $(B)/obj/src/cli/main.d
