# make check-references              the golden files again, from upstream, in a virtual environment
# make check-references PYTHON=…     by an interpreter that has the packages already
# make check-reexpress MODEL=….gguf  a Q4_1/Q8_0 model and its MLX form give the same tokens
.PHONY: check-references check-reexpress
check-references:
	@tools/make_references build/references $(PYTHON)

check-reexpress: $(B)/tests/golden/reexpress
	@$< $(MODEL)
