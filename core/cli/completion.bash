# Completion of `zeroth` for bash: source this file, or run: source <(zeroth completion bash)

# A word of the command line without its quotes; the last word may lack the second quote.
_zeroth_unquoted() {
  local word=$1
  case $word in
    \"* | \'*)
      word=${word#?}
      word=${word%"${1:0:1}"}
      ;;
    *) word=${word//\\/} ;;
  esac
  printf '%s\n' "$word"
}

# Files that begin with $1 and match the pattern $2, and folders, which end with "/". $3: the word as the user typed it;
# names are quoted unless it begins with a quote.
_zeroth_files() {
  local path="" home="" name=""
  while IFS= read -r path; do
    if [[ -d ${path/#\~/$HOME} ]]; then
      name=$path/
    elif [[ $path == $2 ]]; then
      name=$path
    else
      continue
    fi
    home=""
    if [[ $name == \~/* ]]; then
      home=\~/
      name=${name:2}
    fi
    if [[ $name && $3 != [\"\']* ]]; then
      printf '%s%q\n' "$home" "$name"
    else
      printf '%s\n' "$home$name"
    fi
  done < <(compgen -f -- "$1" | LC_ALL=C sort)
}

_zeroth() {
  local words=() word="" at line="" cut="" typed="" option="" found=() files=()
  for ((at = 1; at <= COMP_CWORD; ++at)); do
    word=${COMP_WORDS[at]}
    # bash splits key=value at "=", which is in COMP_WORDBREAKS
    if ((at > 1)) && [[ $word == = || ${COMP_WORDS[at - 1]} == = ]]; then
      words[-1]+=$word
    else
      words+=("$word")
    fi
  done
  typed=${words[-1]}
  [[ $typed == --*=* ]] && option=${typed%%=*}=  # --option=FILE
  for at in "${!words[@]}"; do words[at]=$(_zeroth_unquoted "${words[at]}"); done
  word=${words[-1]}
  [[ $word == *=* && $COMP_WORDBREAKS == *=* ]] && cut=${word%"${word##*=}"}
  while IFS= read -r line; do
    files=()
    case $line in
      :files*) mapfile -t files < <(_zeroth_files "${word#"$option"}" "${line#:files }" "${typed#"$option"}") ;;
      :folders) mapfile -t files < <(_zeroth_files "${word#"$option"}" "" "${typed#"$option"}") ;;
      *) found+=("$line") ;;
    esac
    found+=("${files[@]/#/$option}")
  done < <("${COMP_WORDS[0]/#\~/$HOME}" completion words -- "${words[@]}" 2>/dev/null)
  COMPREPLY=()
  for line in "${found[@]}"; do
    [[ $line == *[=./] ]] && compopt -o nospace 2>/dev/null  # the word is not complete
    COMPREPLY+=("${line#"$cut"}")
  done
}
complete -F _zeroth zeroth
