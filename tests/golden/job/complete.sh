# Prints what bash completes the last argument to; the arguments are the words of a command line as bash splits them.
source <(../../bin/zeroth completion bash)
compopt() { if [[ ! $incomplete ]]; then echo "the word is not complete"; fi; incomplete=1; }
incomplete=""
COMP_WORDS=(../../bin/zeroth "$@")
COMP_CWORD=$#
_zeroth
printf '%s\n' "${COMPREPLY[@]}"
