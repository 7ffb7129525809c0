#!/bin/sh
# Set-up that `make` runs by itself: `setup.sh venv FOLDER` or `setup.sh browser`.
# Needs Python >= 3.11. What the system lacks is installed with apt-get where that exists and one is root.
set -eu

apt() { # apt PACKAGE... : install, if this is root on a system with apt-get
    [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1 || return 1
    echo "installing $*"
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq </dev/null && apt-get install -y -qq --no-install-recommends "$@" </dev/null >/dev/null
}

venv() {
    python=${PYTHON:-python3}
    if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
        echo "Python 3.11 or later is needed and '$python' is not: name one with  make PYTHON=/path/to/python3.12" >&2
        exit 1
    fi
    if ! [ -x "$1/bin/python" ] || ! "$1/bin/python" -m pip --version >/dev/null 2>&1; then
        rm -rf "$1"
        if ! "$python" -m venv "$1" 2>/dev/null; then
            rm -rf "$1"
            if ! apt python3-venv || ! "$python" -m venv "$1"; then
                echo "'$python -m venv' fails: install the venv module (on Debian: sudo apt-get install python3-venv)" >&2
                exit 1
            fi
        fi
    fi
    echo "installing the packages of requirements.txt into $1 (minutes, once)"
    "$1/bin/python" -m pip install --quiet --disable-pip-version-check --no-input -r requirements.txt </dev/null
}

browser() {
    [ -n "${CHROMIUM:-}" ] && [ -x "$CHROMIUM" ] && return 0
    for name in chromium chromium-browser google-chrome google-chrome-stable; do
        command -v "$name" >/dev/null 2>&1 && return 0
    done
    [ -x "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome" ] && return 0
    apt chromium && return 0
    echo "the browser tests need Chromium: install it (sudo apt-get install chromium) or say where it is (CHROMIUM=/path make test)" >&2
    exit 1
}

case "${1:-}" in
    venv) venv "$2" ;;
    browser) browser ;;
    *) echo "usage: setup.sh venv FOLDER | browser" >&2; exit 2 ;;
esac
