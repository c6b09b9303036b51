# Completion of `zeroth` for bash: source this file, or run: source <(zeroth completion bash)

# Files that begin with $1 and match the pattern $2, and folders, which end with "/".
_zeroth_files() {
  local path=""
  while IFS= read -r path; do
    if [[ -d ${path/#\~/$HOME} ]]; then
      echo "$path/"
    elif [[ $path == $2 ]]; then
      echo "$path"
    fi
  done < <(compgen -f -- "$1" | LC_ALL=C sort)
}

_zeroth() {
  local words=() word="" at line="" cut="" found=()
  for ((at = 1; at <= COMP_CWORD; ++at)); do
    word=${COMP_WORDS[at]}
    # bash splits key=value at "=", which is in COMP_WORDBREAKS
    if ((at > 1)) && [[ $word == = || ${COMP_WORDS[at - 1]} == = ]]; then
      words[-1]+=$word
    else
      words+=("$word")
    fi
  done
  word=${words[-1]}
  [[ $word == *=* && $COMP_WORDBREAKS == *=* ]] && cut=${word%"${word##*=}"}
  while IFS= read -r line; do
    case $line in
      :files*) mapfile -t -O "${#found[@]}" found < <(_zeroth_files "$word" "${line#:files }") ;;
      :folders) mapfile -t -O "${#found[@]}" found < <(_zeroth_files "$word" "") ;;
      *) found+=("$line") ;;
    esac
  done < <("${COMP_WORDS[0]/#\~/$HOME}" completion words -- "${words[@]}" 2>/dev/null)
  COMPREPLY=()
  for line in "${found[@]}"; do
    [[ $line == *[=./] ]] && compopt -o nospace 2>/dev/null  # the word is not complete
    COMPREPLY+=("${line#"$cut"}")
  done
}
complete -F _zeroth zeroth
