# What is built and done besides the program: docs, format, install, the editor's database, run.
PREFIX  ?= /usr/local
PROMPT  ?= Why is the sky blue? Answer in one sentence.
MODEL   ?=

.PHONY: run docs format install clean help

run: $(B)/mlxcel
	@MODEL="$(MODEL)" tools/run $(B)/mlxcel $(call quote,$(PROMPT))

# Programs of the build itself, never part of mlxcel, never with sanitizers.
TOOLFLAGS = -std=c17 -O1 -g $(WARN) -Isrc -D_GNU_SOURCE
$(B)/tools/%: tools/%.c $(B)/flags
	@mkdir -p $(@D)
	$(if $(V),,@echo "  CC    $<")
	$(Q)$(CC) $(TOOLFLAGS) -MMD -MP -MF $@.d -MT $@ -o $@ $<
-include $(wildcard $(B)/tools/*.d)

docs: $(B)/tools/gen_environment $(B)/mlxcel
	$(B)/tools/gen_environment > docs/environment.md
	$(B)/mlxcel --help-markdown > docs/cli.md
	$(B)/mlxcel --help-server > docs/server.md

format:
	tools/list_files c h cu | xargs clang-format -i

compile_commands.json: $(B)/flags $(B)/members tools/compile_commands
	@{ $(foreach f,$(CSRC) $(MAIN),printf '%s\n' $(call quote,$(f) $(CC) $(CFLAGS));) \
	   $(foreach f,$(KSRC),printf '%s\n' $(call quote,$(f) $(CC) $(call KFLAGS,$(lastword $(ISAS))));) \
	} | tools/compile_commands > $@

install: $(B)/mlxcel
	install -d $(DESTDIR)$(PREFIX)/bin $(DESTDIR)$(PREFIX)/lib $(DESTDIR)$(PREFIX)/include
	install -m 755 $(B)/mlxcel $(DESTDIR)$(PREFIX)/bin/mlxcel
	ln -sf mlxcel $(DESTDIR)$(PREFIX)/bin/mlxcel-server
	install -m 644 $(B)/libmlxcel.a $(DESTDIR)$(PREFIX)/lib/libmlxcel.a
	install -m 644 include/mlxcel.h $(DESTDIR)$(PREFIX)/include/mlxcel.h

clean:
	rm -rf build compile_commands.json

help:
	@sed -n 's/^# //p;/^ifeq/q' Makefile
