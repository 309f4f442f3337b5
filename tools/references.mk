# make check-references              the golden files again, from upstream, in a virtual environment
# make check-references PYTHON=…     by an interpreter that has the packages already
# make check-reexpress MODEL=….gguf  a Q4_1/Q8_0 model and its MLX form give the same tokens
# make check-text MODEL=…            a GPU's greedy text is the CPU's in the float-exact mode
.PHONY: check-references check-reexpress check-text
check-references:
	@tools/make_references build/references $(PYTHON)

check-reexpress: $(B)/tests/golden/reexpress
	@$< $(MODEL)

check-text: $(B)/tests/golden/same_text
	@$< $(MODEL)
