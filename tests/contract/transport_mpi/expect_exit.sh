#!/usr/bin/env bash
# expect_exit.sh CODE COMMAND...: runs the command; succeeds when it exits with CODE, or with anything but 0 and 124
# (time over) when CODE is "failure". A hang ends after five minutes.
expected=$1
shift
timeout 300 "$@"
code=$?
if [ "$expected" = failure ]; then
  [ $code -ne 0 ] && [ $code -ne 124 ]
else
  [ $code -eq "$expected" ]
fi
