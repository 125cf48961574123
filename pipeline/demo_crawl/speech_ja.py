"""Japanese sentences for the demo crawl."""

from pipeline.demo_crawl.speech import Speech

JAPANESE = Speech(
    language="ja",
    menu=("ホーム", "記事", "催し", "私たちについて", "お問い合わせ"),
    titles=("{place}の一日", "{topic}についての覚え書き", "{person}と{object}", "{topic}の今と昔"),
    templates=(
        "{past}、{person}は{place}で{object}を見つけた。",
        "{person}は{past}に{object}を売ってしまった。",
        "{often}、{person}は{place}で本を読んでいる。",
        "{thing}は{past}から{state}だった。",
        "{reason}、{person}は{place}で{object}を探した。",
        "{person}がなぜ{object}を持っているのか、だれも知らなかった。",
        "{often}、{thing}は{state}だ。",
        "{number}百円あれば、{place}で{object}が買える。",
        "{person}は{past}、{object}をなくしたそうだ。",
        "{reason}、{person}は{place}で友人を待っていた。",
        "{thing}が{state}かどうかは、{person}がいちばんよく知っている。",
        "それから{person}は{object}を家に持ち帰った。",
        "{person}はまだ{place}で{object}を見つけるかもしれない。",
        "{number}時間たって、{person}はようやく{object}を思い出した。",
        "{number}年のあいだ、{person}は{place}で{object}を売り続けている。",
        "残念ながら{thing}は{state}ではなかった。",
        "{person}は{number}人の友人と{topic}の展示を見に行った。",
        "{often}、{person}は{topic}について話したがる。",
        "{thing}が{state}なら、{person}は家にいる。",
        "{person}によると、{thing}は{state}らしい。",
        "{past}、{place}で{topic}の講演があった。",
        "{person}が{object}を手に取ると、雨が降り出した。",
        "{often}、{person}は窓を開けて鳥の声を聞く。",
        "それでも{person}は{object}を大切にしている。",
        "{topic}を知りたい人は、{often}、図書館へ行く。",
        "{place}には{number}週間前から{topic}のポスターが貼ってある。",
        "{reason}、{person}が{object}を持っていて助かった。",
        "{thing}が{state}だったので、みんな満足した。",
        "{person}は{place}で子どもたちに{object}を見せた。",
        "昔は{place}に{number}軒の店があった。",
        "{past}の新聞に{topic}の記事が載っていた。",
        "{reason}、{person}はついに{object}を見つけた。",
        "{person}だけが、{thing}は{state}だと信じていた。",
        "{number}分後、{person}は{object}を取りに戻ってきた。",
        "{past}、{person}は{place}で古い友人に会った。",
        "その日の話題は{topic}だった。",
        "{object}がないと、{person}は出かけられない。",
        "{person}にとって、{topic}は{object}よりおもしろい。",
        "{often}、{object}を持った{person}を{place}で見かける。",
        "本を{number}ページ読んで、{person}は{topic}に興味を持った。",
    ),
    phrases={
        "past": (
            "昨日の夜 / 三週間前 / 去年の夏 / 先週の金曜日 / 霧の深い朝 / 祭りの前日 / 真夜中 / 嵐の翌日 / "
            "何年も前 / 入学式の日"
        ),
        "often": "毎朝 / 週末 / 秋になると / 夕方 / 天気のよい日 / ときどき / たいてい / 冬になると / 仕事のあと",
        "person": (
            "村のパン屋さん / 私の祖母 / 年老いた漁師 / 若い先生 / 隣の住人 / 庭師 / 車掌さん / 大学生の友人 / "
            "町長 / 私の兄 / 時計職人 / 遠くから来た旅人 / 図書館の司書 / 水車小屋の主人 / 親切な郵便屋さん"
        ),
        "object": (
            "りんごのかご / 古い自転車 / 急須 / 地下室の鍵 / 長い手紙 / 近所の地図 / 焼きたてのパン / 鳥の本 / "
            "写真の箱 / 暖かい手袋 / 前の日の新聞 / チューリップの花束 / お菓子の作り方 / 新しいランプ / 緑の傘"
        ),
        "place": (
            "市場の広場 / 教会の裏 / 湖のほとり / 小さな工房 / 役場の前 / 美術館の庭 / 古い水車のそば / 停留所 / "
            "橋の上 / 静かな路地 / 並木の下 / 丘の上 / 港 / 台所"
        ),
        "reason": (
            "雨が激しく降っていたので / 店はもう閉まっていたが / 鐘が鳴っているあいだに / 客が来る前に / "
            "列車が出たあとで / 日が差してきたころ / 道が通れなかったので / 停電していたため"
        ),
        "topic": (
            "町の歴史 / 珍しい植物 / ミツバチの暮らし / 古い地図 / 郷土料理 / バイオリン作り / 遠い国々 / 冬の星空 / "
            "川の船 / よい本"
        ),
        "thing": (
            "古い橋 / 新しい時刻表 / 角の喫茶店 / この展覧会 / 湖への道 / 噴水の水 / 塔からの眺め / 公園の音楽会 / "
            "あの工房 / 今日のスープ"
        ),
        "state": ("意外に静か / とても有名 / 少し不便 / かなり高価 / 実に見事 / ほとんど空っぽ / なかなか立派 / 特別"),
        "number": "二 / 三 / 四 / 五 / 七 / 八 / 十 / 十二 / 二十",
    },
    space="",
)
