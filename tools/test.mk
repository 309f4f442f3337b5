# Tests and checks. `check` builds with -Werror in its own folder, then one runner starts every test
# program and every check as a process of its own.
TESTS   := $(wildcard $(foreach d,unit ops golden server cli,tests/$(d)/test_*.c))
FUZZ    := $(wildcard tests/fuzz/fuzz_*.c)
TPICK   := $(if $(T),$(foreach t,$(TESTS),$(if $(findstring $(T),$(t)),$(t))),$(TESTS))
FPICK   := $(if $(T),$(foreach t,$(FUZZ),$(if $(findstring $(T),$(t)),$(t))),$(FUZZ))
TBIN    := $(TPICK:%.c=$(B)/%) $(FPICK:tests/fuzz/fuzz_%.c=$(B)/tests/fuzz/replay_%)
# Code that tests share: tests/support/*.c, with its headers; include as "support/x.h".
TSUP    := $(patsubst %.c,$(B)/obj/%.o,$(wildcard tests/support/*.c))
TDATA   := $(patsubst tests/data/%.xz,$(B)/data/%,$(shell find tests/data -name '*.xz' 2>/dev/null))
TFLAGS   = $(CFLAGS) -Itests -DMX_TEST_DATA='"tests/data"' -DMX_TEST_BUILD_DATA='"$(B)/data"'
TFLAGS  += -DMX_TEST_PROGRAM='"$(B)/mlxcel"' -DMX_TEST_SLOW=$(if $(SAN),10,1)

.PHONY: tests check check-build check-run check-clients check-cuda fuzz
tests: $(TBIN) $(TDATA)

$(B)/tests/fuzz/replay_%: $(B)/obj/tests/fuzz/fuzz_%.o $(B)/obj/tests/fuzz/replay.o \
                          $(B)/libmlxcel.a
	@mkdir -p $(@D) && rm -f $@
	$(if $(V),,@echo "  TEST  tests/fuzz/fuzz_$*.c (replay)")
	$(Q)$(CC) $(LDFLAGS) -o $@ $^ $(LDLIBS)
$(B)/tests/%: tests/%.c $(B)/libmlxcel.a $(TSUP) $(B)/flags
	@mkdir -p $(@D) && rm -f $@
	$(if $(V),,@echo "  TEST  $<")
	$(Q)$(CC) $(TFLAGS) -MMD -MP -MF $@.d -MT $@ $(LDFLAGS) -o $@ $< $(TSUP) \
	    $(B)/libmlxcel.a -lcmocka $(LDLIBS)
$(B)/obj/tests/%.o: tests/%.c $(B)/flags
	@mkdir -p $(@D)
	$(if $(V),,@echo "  CC    $<")
	$(Q)$(CC) $(TFLAGS) -MMD -MP -c -o $@ $<
$(B)/data/%: tests/data/%.xz
	@mkdir -p $(@D)
	@xz -dc $< > $@
$(filter $(B)/tests/cli/% $(B)/tests/server/%,$(TBIN)): | $(PROGRAM)
-include $(TBIN:=.d) $(TSUP:.o=.d) $(wildcard $(B)/obj/tests/fuzz/*.d)

# name=command, run by the shell; only in the plain configuration, sources are the same in all.
CHECKS  := format=tools/check_format layers=tools/check_layers
CHECKS  += sizes='tools/list_files c h cu | $(B)/tools/check_sizes'
CHECKS  += banned='tools/list_files | $(B)/tools/check_banned'
CHECKS  += knobs='$(B)/tools/gen_environment | tools/check_made docs/environment.md'
CHECKS  += $(if $(PROGRAM),help='$(PROGRAM) --help-markdown | tools/check_made docs/cli.md')
CHECKS  += $(if $(PROGRAM),server='$(PROGRAM) --help-server | tools/check_made docs/server.md')
CHECKS  += checks='tools/check_checks $(B)'
CHECKS  := $(if $(SAN)$(DEBUG)$(T),,$(CHECKS))
CTOOLS  := $(if $(CHECKS),$(B)/tools/check_sizes $(B)/tools/check_banned $(B)/tools/gen_environment)

# gcc 12 misaligns 64-byte vectors in the frames that detect use after return
export ASAN_OPTIONS  ?= detect_leaks=1:detect_stack_use_after_return=0:strict_string_checks=1:allocator_may_return_null=1
export UBSAN_OPTIONS ?= print_stacktrace=1:halt_on_error=1
export TSAN_OPTIONS  ?= halt_on_error=1:second_deadlock_stack=1

# What does not compile hides no test that can do without it: link and run the rest, and count a
# failed "build".
check:
	@$(MAKE) --no-print-directory WERROR=1 check-run
check-build: $(PROGRAM) $(CTOOLS) tests
	@:
check-run: $(B)/tests/runner
	@failed=; $(MAKE) --no-print-directory -k check-build || { failed=build=false; \
	 $(MAKE) --no-print-directory -k PARTIAL=1 tests > $(B)/partial.log 2>&1; }; \
	 $(B)/tests/runner $(if $(SAN),--slow 10) --logs $(B)/logs $(CHECKS) $$failed $(TBIN)
$(B)/tests/runner: tests/runner.c $(B)/flags
	@mkdir -p $(@D)
	$(if $(V),,@echo "  CC    $<")
	$(Q)$(CC) $(TOOLFLAGS) -o $@ $<

check-clients: $(PROGRAM) $(B)/tests/runner
	@tools/check_clients $(B)

# The library is compiled again by clang with coverage, in a folder of its own.
SECONDS ?= 60
CLANG   ?= clang
fuzz:
	@test -f tests/fuzz/fuzz_$(T).c || { echo "no tests/fuzz/fuzz_$(T).c; T is one of:" \
	 $(FUZZ:tests/fuzz/fuzz_%.c=%); exit 2; }
	@$(MAKE) --no-print-directory CC=$(CLANG) SAN=fuzzer-no-link,address,undefined B=build/fuzz \
	 NVCC= fuzz-run T=$(T) SECONDS=$(SECONDS)
.PHONY: fuzz-run
fuzz-run: build/fuzz/fuzz_$(T)
	@mkdir -p build/fuzz/corpus/$(T)
	build/fuzz/fuzz_$(T) -max_total_time=$(SECONDS) -timeout=10 -rss_limit_mb=2048 \
	 -print_final_stats=1 -artifact_prefix=build/fuzz/$(T)- \
	 $(addprefix -dict=,$(wildcard tests/fuzz/$(T).dict)) \
	 build/fuzz/corpus/$(T) $(wildcard tests/fuzz/corpus/$(T))
build/fuzz/fuzz_%: tests/fuzz/fuzz_%.c build/fuzz/libmlxcel.a
	$(Q)$(CC) $(TFLAGS) -fsanitize=fuzzer -MMD -MP -MF $@.d -o $@ $< build/fuzz/libmlxcel.a $(LDLIBS)
