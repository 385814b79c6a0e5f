"""URLs that must never reach a private address, each with its reason."""

from collections.abc import Iterator

# Spellings of loopback, metadata and private addresses that some parsers accept.
_SPELLINGS = """
127.0.0.1 127.1 127.0.1 127.00.00.01 0127.0.0.1 0177.0.0.1 0x7f.0.0.1 0x7f.1 0x7f000001 2130706433
017700000001 0x7F.0x0.0x0.0x1 127.0.0.1. 127.0.0.1.. 127.255.255.255 0 0.0 0.0.0.0 0.0.0.1 00 0x0
10.0.0.1 10.1 167772161 10.255.255.255 172.16.0.1 172.31.255.254 0xac100001 192.168.0.1 192.168.1
192.168.1.254 3232235777 0300.0250.0.1 169.254.169.254 169.254.43518 0xa9fea9fe 2852039166
0251.0376.0251.0376 169.254.170.2 169.254.0.1 100.64.0.1 100.100.100.200 100.127.255.255
168.63.129.16 192.0.0.1 192.0.0.170 192.0.0.192 192.0.2.1 192.88.99.1 198.18.0.1 198.19.255.255
198.51.100.7 203.0.113.9 224.0.0.1 239.255.255.250 240.0.0.1 255.255.255.255 4294967295 1.2.3.4.5
1.2.3 999.1.1.1 256.256.256.256 1e3.1 0b1.1 127.0.0.1%00 127。0。0。1 １２７.0.0.1 ①②⑦.0.0.1
localhost LOCALHOST localhost. a.localhost ip6-localhost localhost.localdomain
metadata.google.internal
metadata instance-data router.local nas.home.arpa [::1] [::] [::0] [0:0:0:0:0:0:0:1] [::127.0.0.1]
[::ffff:127.0.0.1] [::ffff:7f00:1] [::ffff:0:1] [::ffff:10.0.0.1] [::ffff:169.254.169.254]
[::ffff:a9fe:a9fe] [::ffff:0:127.0.0.1] [::ffff:0:a9fe:a9fe] [::10.0.0.1] [::a9fe:a9fe]
[64:ff9b::127.0.0.1] [64:ff9b::a9fe:a9fe] [64:ff9b::10.0.0.1] [64:ff9b::c0a8:1] [64:ff9b:1::1]
[64:ff9b:1:ffff::7f00:1] [2002:7f00:1::] [2002:a9fe:a9fe::] [2002:0a00:0001::1]
[2002:c0a8:0101::1] [2002:6440:1::] [2001:0:7f00:1::] [2001:0:a9fe:a9fe::]
[2001:0:808:808::80ff:fffe] [2001:0:808:808::5601:5601] [2001:0:4136:e378:8000:63bf:3fff:fdd2]
[fe80::1] [fe80::1%25eth0] [fe80::a9fe:a9fe] [febf::1] [fec0::1] [fc00::1] [fd00::1]
[fd00:ec2::254] [fd00:ec2::23] [fdff:ffff::1] [ff02::1] [ff01::1] [ff0e::1] [2001:db8::1]
[2001:2::1] [2001:10::1] [2001:20::1] [2001:1::1] [3fff::1] [100::1] [5f00::1] [4000::1] [::2]
[1::] [2a00:1450::5efe:7f00:1] [2a00:1450::200:5efe:10.0.0.1] [::1 ::1] [::1]x [:::1] [::1.2]
[::ffff:127.1] [0:0:0:0:0:ffff:127.0.0.1] [::FFFF:7F00:0001] [::ffff:c0a8:0101] [::ffff:0.0.0.0]
[v1.x] [127.0.0.1] [localhost]
"""

# URLs whose host parsers may misread: userinfo, fragments, schemes, separators, control bytes.
_TRICKS = [
    # Not ASCII, but ASCII once their case is changed: long s, Kelvin, dotted I, dotless i.
    *(f"https://a{char}.example.com/" for char in "\u017f\u212a\u0130\u0131"),
    *(f"https://example.com/{char}" for char in "\u017f\u212a\u0130\u0131"),
    *(f"https://example.com/?{char}" for char in "\u017f\u212a\u0130\u0131"),
    *(f"http{char}://a.b/" for char in "\u017f\u212a\u0130\u0131"),
    "https://example.com:\u0664\u0664\u0663/",
    "https://example.com:0/",
    "http://example.com/",
    "ftp://example.com/",
    "file:///etc/passwd",
    "gopher://127.0.0.1:6379/_INFO",
    "dict://127.0.0.1:6379/",
    "ldap://127.0.0.1/",
    "unix:///var/run/docker.sock",
    "data:text/plain,hi",
    "javascript:alert(1)",
    "//127.0.0.1/",
    "https:/127.0.0.1/",
    "https:127.0.0.1",
    "https:///127.0.0.1/",
    "https:\\\\127.0.0.1\\",
    "https://",
    "https:///",
    "https://:443/",
    "https://?x",
    "https://#x",
    "https://@127.0.0.1/",
    "https://user@127.0.0.1/",
    "https://user:pass@127.0.0.1/",
    "https://example.com@127.0.0.1/",
    "https://example.com:443@127.0.0.1/",
    "https://127.0.0.1@example.com/",
    "https://example.com%40127.0.0.1/",
    "https://127.0.0.1#@example.com/",
    "https://127.0.0.1\\@example.com/",
    "https://example.com\\@127.0.0.1/",
    "https://127.0.0.1?@example.com/",
    "https://127.0.0.1;@example.com/",
    "https://127.0.0.1,example.com/",
    "https://127.0.0.1 example.com/",
    "https://127.0.0.1\t.example.com/",
    "https://127.0.0.1\n.example.com/",
    "https://127.0.0.1\r\nHost: x/",
    "https://127.0.0.1\x00.example.com/",
    " https://127.0.0.1/",
    "https://127.0.0.1/ ",
    "https://exa mple.com/",
    "https://example.com/a b",
    "https://example.com/\r\nX-Evil: 1",
    "https://example.com/\x00",
    "https://example.com/#fragment",
    "https://example.com/<script>",
    "https://example.com/%zz",
    "https://example.com/%",
    "https://example.com:0/",
    "https://example.com:-1/",
    "https://example.com:65536/",
    "https://example.com:99999/",
    "https://example.com:80a/",
    "https://example.com:/",
    "https://example.com:443:443/",
    "https://%31%32%37.0.0.1/",
    "https://127%2e0%2e0%2e1/",
    "https://lo%63alhost/",
    "https://.example.com/",
    "https://example..com/",
    "https://example.com../",
    "https://-example.com/",
    "https://example-.com/",
    "https://" + "a" * 64 + ".com/",
    "https://" + "a." * 130 + "com/",
    "https://example.com/" + "a" * 2048,
    "https://münchen.example/",
    "https://еxample.com/",
    "https://example。com/",
    "https://xn--/",
    "https://single/",
    "",
    "https",
    "127.0.0.1",
    "[::1]:443",
]


def hostile_urls() -> Iterator[str]:
    """More than two hundred URLs."""
    for host in _SPELLINGS.split():
        yield f"https://{host}/hook"
    yield from _TRICKS


# Private answers of a name server; tests also combine them with a public one.
PRIVATE_ANSWERS = (
    *("127.0.0.1", "10.0.0.7", "172.16.5.4", "192.168.1.1", "169.254.169.254", "100.64.0.1"),
    *("0.0.0.0", "192.0.0.192", "224.0.0.1", "255.255.255.255", "168.63.129.16", "::1", "::"),
    *("fe80::1", "fe80::1%eth0", "fd00:ec2::254", "ff02::1", "::ffff:127.0.0.1", "::127.0.0.1"),
    *("64:ff9b::7f00:1", "2002:7f00:1::", "2001:0:808:808::80ff:fffe", "2001:db8::1"),
)
